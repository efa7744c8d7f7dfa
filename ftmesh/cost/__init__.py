"""Costs: simulate a schedule, bound it from below, and model links, devices and kernels."""
