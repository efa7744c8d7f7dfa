"""The forms in which compilers write replica groups."""

import pytest

from ftmesh import ArgumentError
from ftmesh.execute.hlo_text import parse_replica_groups

GLOBAL = "use_global_device_ids=true"
FORMS = {
    "listed": (f"all-reduce(%x), channel_id=1, replica_groups={{{{0,1}},{{2,3}}}}, {GLOBAL}", 4,
               [[0, 1], [2, 3]]),
    "of different sizes": ("all-reduce(%x), replica_groups={{0,1,2},{3}}, to_apply=%add", 4,
                        [[0, 1, 2], [3]]),
    "all devices": ("all-reduce(%x), replica_groups={}, to_apply=%add", 3, [[0, 1, 2]]),
    "not stated": ("all-reduce(%x), to_apply=%add", 3, [[0, 1, 2]]),
    "all partitions of a replica": ("all-reduce(%x), channel_id=1, replica_groups={{0}}", 4,
                                    [[0, 1, 2, 3]]),
    "partitions": ("all-to-all(%x), channel_id=1, replica_groups={{0,1},{2,3}}", 4,
                   [[0, 1], [2, 3]]),
    "in order": ("all-gather(%x), replica_groups=[4,3]<=[12], dimensions={0}", 12,
                 [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]),
    "transposed": ("all-gather(%x), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", 4,
                   [[0, 2], [1, 3]]),
    "along an axis": (f"all-gather(%x), channel_id=1, replica_groups=mesh['a'=2,'b'=4] {{'b'}}, "
                      f"dimensions={{0}}, {GLOBAL}", 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "along the first axis": ("all-gather(%x), replica_groups=mesh['a'=2,'b'=3] {'a'}", 6,
                             [[0, 3], [1, 4], [2, 5]]),
    "along both": ("all-gather(%x), replica_groups=mesh['a'=2,'b'=2] {'a','b'}", 4,
                   [[0, 1, 2, 3]]),
    "along a part of an axis": ("all-gather(%x), replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", 8,
                                [[0, 2], [1, 3], [4, 6], [5, 7]]),
    "along an axis and a part": ("all-gather(%x), replica_groups=mesh['a'=2,'b'=4] {'a','b':(2)2}",
                                 8, [[0, 1, 4, 5], [2, 3, 6, 7]]),
    "devices in another order": ("all-gather(%x), replica_groups=mesh['a'=2,'b'=2], "
                                 "device_ids=([2,2]T(1,0)) {'b'}", 4, [[0, 2], [1, 3]]),
    "devices listed": ("all-gather(%x), replica_groups=@mesh<a=2,b=2>, device_ids=(0,3,1,2) {b}",
                       4, [[0, 3], [1, 2]]),
    "pairs": ("collective-permute(%x), channel_id=1, source_target_pairs={{0,2},{2,0}}, x={{1}}",
              4, [[0, 2], [2, 0]]),
    "no pairs": ("collective-permute(%x), channel_id=1, source_target_pairs={}", 4, []),
}  # fmt: skip


@pytest.mark.parametrize(("text", "num_devices", "groups"), FORMS.values(), ids=FORMS)
def test_forms(text, num_devices, groups):
    assert [group.tolist() for group in parse_replica_groups(text, num_devices)] == groups


def test_an_unknown_form():
    with pytest.raises(ArgumentError, match=r"in an unknown form: ring\(4\)"):
        parse_replica_groups("all-reduce(%x), replica_groups=ring(4), to_apply=%add", 4)
