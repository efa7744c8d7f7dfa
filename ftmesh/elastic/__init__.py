"""An emulated pod on one machine: its processes started, heard, watched and ended."""
