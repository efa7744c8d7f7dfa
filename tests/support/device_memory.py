"""How much memory arrays take on devices, and how much more while something is done."""

import jax


def device_bytes():
    """What live arrays take, by device; memory that several arrays share counts once."""
    seen: dict[int, dict[int, int]] = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            there = seen.setdefault(shard.device.id, {})
            there[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return {device: sum(sizes.values()) for device, sizes in seen.items()}


class Watch:
    """The most that any device has held, beside what it held when this was made."""

    def __init__(self):
        self.before, self.growth = device_bytes(), 1.0

    def look(self):
        for device, size in device_bytes().items():
            self.growth = max(self.growth, size / (self.before.get(device) or 1))

    def after(self, function):
        """The same function; a look is taken while what it has used and made is still there."""

        def watched(*args):
            result = function(*args)
            self.look()
            return result

        return watched
