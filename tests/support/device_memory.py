"""Memory of arrays on devices, and its peak."""

import jax


def device_bytes():
    """Bytes of live arrays by device; memory that several arrays share counts once."""
    seen: dict[int, dict[int, int]] = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            buffers = seen.setdefault(shard.device.id, {})
            buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return {device: sum(sizes.values()) for device, sizes in seen.items()}


class PeakMemory:
    """The largest growth of any device's memory since creation, as a ratio."""

    def __init__(self):
        self.before, self.growth = device_bytes(), 1.0

    def update(self):
        for device, size in device_bytes().items():
            self.growth = max(self.growth, size / (self.before.get(device) or 1))

    def wrap(self, function):
        """Wrap a function to measure while its arguments and result are alive."""

        def measured(*args):
            result = function(*args)
            self.update()
            return result

        return measured
