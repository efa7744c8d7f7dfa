"""What libtpu is told of wrap links, and the slices that it then lists."""

import pytest

from ftmesh import TopologyError
from ftmesh.tpu import compiler
from tests.support.reporting import run_json

SLICES = {
    "v2:16x16": (2, [True, True]),
    "v3:16x32": (2, [False, False]),
    "v3:32x32": (2, [True, True]),
    "v4:4x4x1": (2, [False, False]),
    "v4:4x4x8": (2, [True, True, True]),
    "v5e:8x16": (1, [False, True]),
    "v5e:16x16": (1, [True, True]),
    "v5p:2x2x2": (1, [False, False, False]),
    "v5p:4x4x8": (1, [True, True, True]),
    "v6e:2x4": (1, [False, False]),
    "v6e:8x8": (1, [False, False]),
    "v6e:8x16": (1, [False, True]),
    "v6e:16x16": (1, [True, True]),
    "tpu7x:4x4x4": (2, [True, True, True]),
    "v7x:2x2x1": (2, [False, False]),
}

LISTED = """
import json, sys, ftmesh
from ftmesh.tpu.compiler import tpu_devices
layouts = {}
for name in sys.argv[1:]:
    topology = ftmesh.Topology.from_devices(tpu_devices(name))
    shape = name.partition(":")[2].removesuffix("x1")
    assert (topology.name, topology.failed) == (shape, frozenset()), topology
    hosts = {(d.process_index, d.coords[0] // 2, d.coords[1] // 2) for d in topology.devices}
    if topology.num_chips > 8:  # hosts have blocks of 2x2 chips
        assert len(hosts) == topology.num_chips // 4, len(hosts)
    layouts[name] = [topology.devices_per_chip, topology.wrap]
print(json.dumps(layouts))
"""


@pytest.mark.skipif(
    not compiler.has_libtpu(), reason="libtpu, the TPU compiler, exists for x86_64 Linux only"
)
def test_slices_as_libtpu_lists_them():
    assert run_json("-c", LISTED, *SLICES) == {name: list(known) for name, known in SLICES.items()}


@pytest.mark.parametrize(
    ("name", "hosts", "wrap"),
    [
        ("v6e:16x16", (2, 2, 1), (True, True, False)),
        ("v6e:8x16", (2, 2, 1), (False, True, False)),
        ("v5p:4x4x8", (2, 2, 1), (True, True, True)),
        ("v3:32x32x1", (2, 2, 1), (True, True, False)),
        ("v6e:1x16", (1, 2, 1), (False, True, False)),
        ("v6e:8x8", None, None),
        ("v5p:4x4x1", None, None),
        ("v99:16x16", None, None),
    ],
)
def test_libtpu_is_told_of_wrap_links(name, hosts, wrap):
    generation, frame = compiler.parse_slice(name)
    wraps = compiler.slice_wraps(generation, frame.shape)
    expected = {} if hosts is None else {"chips_per_host_bounds": hosts, "wrap": wrap}
    assert compiler.wrap_options(frame, wraps) == expected


class Listed:
    devices = ()


@pytest.mark.parametrize(
    ("name", "wrap", "told"),
    [
        ("v6e:16x16", None, ("v6e:16x16", (True, True, False))),
        ("v6e:16x16", False, ("v6e:16x16", None)),
        ("v5p:4x1x4", [False, True], ("v5p:4x1x4", (False, False, True))),
        ("v7x:4x4x4", None, ("tpu7x:4x4x4", (True, True, True))),
        ("v3:16x32", None, ("v3:16x32", None)),
    ],
)
def test_what_is_given_wins(monkeypatch, name, wrap, told):
    asked = []

    def get_topology_desc(*, platform, topology_name, **options):
        asked.append((topology_name, options.get("wrap")))
        return Listed

    monkeypatch.setattr(compiler, "has_libtpu", lambda: True)
    monkeypatch.setattr(compiler.topologies, "get_topology_desc", get_topology_desc)
    for variable in compiler._ENVIRONMENT:
        monkeypatch.setenv(variable, "")
    compiler.tpu_devices(name, wrap=wrap)
    assert asked == [told]
    with pytest.raises(TopologyError, match="needs one entry for each axis"):
        compiler.tpu_devices(name, wrap=[True])
