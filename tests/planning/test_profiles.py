"""Which profile a plan takes its costs from, and what it does with a kernel that was measured."""

import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import jax
import pytest

import ftmesh
from ftmesh import ArgumentError, Plan, TiledTopology, Topology
from ftmesh.algorithms import registry
from ftmesh.cost.links import DEFAULT, NETWORKS, KernelModel
from ftmesh.elastic.precompile import cached_plan
from ftmesh.planning import profiles
from ftmesh.planning.plan_cache import CACHE_VARIABLE
from ftmesh.planning.profiles import (
    PROFILE_VARIABLE,
    find_costs,
    install_profile,
    installed_profile,
    profile_folder,
)
from ftmesh.planning.selection import select_algorithm
from ftmesh.testing import cpu_grid
from tests.support.profiles import NOW, make_profile, timed_sums, tpus

HOLE = "2x2@2,2"
DAYS_AGO = 3
PAYLOAD = 16_000_000


def recent(**changes):
    """A profile as measured three days ago by the clock of this machine."""
    time = datetime.now(UTC) - timedelta(days=DAYS_AGO, hours=1)
    return make_profile(measured_at=time.isoformat(timespec="seconds"), **changes)


def with_kernel(*passed):
    return recent(sums=timed_sums(kernel=True), kernel_passed=passed)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache of its own, and no warning logged yet."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    profiles._warn_once.cache_clear()
    return tmp_path


class TestGiven:
    def test_a_profile_or_its_path(self, tmp_path):
        profile, path = recent(), tmp_path / "my profile.json"
        profile.save(path)
        for link in (profile, path, str(path)):
            for topology in (tpus(failed=HOLE), Topology.grid("6x6", failed=HOLE)):
                plan = ftmesh.plan(topology, link=link)
                assert plan.network == profile.network()
                assert "\n  costs: measured on TPU v6e 6x6, 3 days ago\n" in str(plan)
        ring = registry.build_schedule(Topology.grid("6x6", failed=HOLE), "ring")
        assert Plan.from_schedule(ring, link=path).network == profile.network()
        assert "costs: measured on TPU v6e 6x6, 20" in str(ftmesh.plan(topology, link=plan.network))

    def test_of_another_mesh(self):
        says = "the profile was measured on TPU v6e 6x6, and this is TPU v6e 4x4: run ftmesh self"
        with pytest.raises(ArgumentError, match=says):
            ftmesh.plan(tpus((4, 4)), link=recent())

    def test_an_old_one_is_taken_with_a_note(self):
        later = NOW + timedelta(days=200)
        costs = find_costs(tpus(failed=HOLE), make_profile(), now=later)
        assert costs.measured == (
            "measured on TPU v6e 6x6, 201 days ago; stale: run ftmesh selftest here again"
        )

    def test_one_from_the_future_is_not(self):
        with pytest.raises(ArgumentError, match="the profile was measured in the future"):
            find_costs(tpus(), make_profile(), now=NOW - timedelta(days=30))

    def test_a_file_that_is_none(self, tmp_path):
        path = tmp_path / "profile.json"
        with pytest.raises(ArgumentError, match=r"cannot read profile .*: No such file"):
            ftmesh.plan(tpus(), link=str(path))
        path.write_text("{}")
        with pytest.raises(ArgumentError, match="is not a profile: its format is not"):
            ftmesh.plan(tpus(), link=path)

    def test_other_links_are_not_measured(self):
        for link in (None, "v6e", "50GB/s", 5e10, DEFAULT):
            plan = ftmesh.plan(tpus(failed=HOLE), link=link)
            assert "\n  costs: not measured\n" in str(plan)

    def test_a_file_that_changed_is_read_again(self, tmp_path):
        path = tmp_path / "profile.json"
        recent().save(path)
        first = find_costs(tpus(failed=HOLE), path).network
        slower = tuple(
            replace(one, low_s=2 * one.low_s, median_s=2 * one.median_s, high_s=2 * one.high_s)
            for one in timed_sums()
        )
        recent(sums=slower).save(path)
        assert (
            find_costs(tpus(failed=HOLE), path).network.collective_launch > first.collective_launch
        )


class TestEnvironment:
    def test_it_names_a_profile(self, monkeypatch, cache):
        path = cache / "named.json"
        recent().save(path)
        monkeypatch.setenv(PROFILE_VARIABLE, str(path))
        for topology in (tpus(failed=HOLE), tpus(failed=HOLE, processes=2)):
            assert ftmesh.plan(topology).network == recent().network()
        assert ftmesh.plan(tpus(), link="v6e").network == NETWORKS["v6e"]
        assert ftmesh.plan(Topology.grid("4x4")).network == DEFAULT  # without devices

    def test_it_must_fit(self, monkeypatch, cache):
        path = cache / "named.json"
        recent().save(path)
        monkeypatch.setenv(PROFILE_VARIABLE, str(path))
        says = f"variable FTMESH_PROFILE: profile {path} was measured on TPU v6e 6x6, and this is "
        for topology, here in ((tpus((4, 4)), "TPU v6e 4x4"), (cpu_grid("6x6"), "cpu 6x6")):
            with pytest.raises(ArgumentError, match=f"{says}{here}: run ftmesh selftest here"):
                ftmesh.plan(topology)
        monkeypatch.setenv(PROFILE_VARIABLE, str(cache / "none.json"))
        with pytest.raises(ArgumentError, match="cannot read profile"):
            ftmesh.plan(tpus())


class TestInstalled:
    def test_it_is_found(self, cache):
        path = install_profile(recent())
        assert path == cache / "profiles" / "tpu-v6-lite-6x6-wrap-none-1.json"
        plan = ftmesh.plan(tpus(failed=HOLE))
        assert plan.network == recent().network()
        assert "costs: measured on TPU v6e 6x6, 3 days ago" in str(plan)
        assert cached_plan(tpus(failed=HOLE), "auto").network == plan.network
        assert ftmesh.plan(tpus((4, 4))).network == NETWORKS["v6e"]
        assert ftmesh.plan(tpus(kind="TPU v5 lite")).network == NETWORKS["v5e"]
        assert ftmesh.plan(Topology.grid("6x6")).network == DEFAULT

    def test_an_installed_one_is_replaced(self, cache):
        install_profile(recent())
        install_profile(recent(sums=timed_sums(noise=0.05)))
        found = installed_profile(tpus()).profile
        assert found.network() == make_profile(timed_sums(noise=0.05)).network() or (
            found.sums == timed_sums(noise=0.05)
        )

    def test_several_processes_do_not_take_it(self, cache):
        path = install_profile(recent())
        plan = ftmesh.plan(tpus(failed=HOLE, processes=2))
        assert plan.network == NETWORKS["v6e"]
        assert (
            f"costs: not measured (profile {path} is not used by several processes: copy it to "
            "every host and set FTMESH_PROFILE, or give link=)" in str(plan)
        )

    def test_cpu_devices_do_not_take_it(self, cache):
        topology = cpu_grid("4x4")
        kind = jax.devices()[0].device_kind
        changes = {"device_kind": kind, "platform": "cpu", "shape": (4, 4), "num_devices": 16}
        ours = tuple(replace(one, failed="") for one in timed_sums())
        install_profile(recent(sums=ours, **changes))
        assert installed_profile(topology).profile is None
        assert ftmesh.plan(topology).network == DEFAULT
        assert ftmesh.plan(topology, link=recent(sums=ours, **changes)).network != DEFAULT

    @pytest.mark.parametrize(
        ("spoil", "reason"),
        [
            (lambda path: path.write_text("{"), "is not a profile: it is not JSON"),
            (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
            (
                lambda path: recent(device_kind="TPU v5 lite").save(path),
                "measured on TPU v5e 6x6, and this is TPU v6e 6x6: run ftmesh selftest here",
            ),
            (lambda path: recent(shape=(8, 6)).save(path), "and this is TPU v6e 6x6"),
            (lambda path: recent(wrap=(True, False)).save(path), "measured on TPU v6e 6x6 (wra"),
            (lambda path: recent(ftmesh_version="0.0.9").save(path), "with ftmesh 0.0.9, and this"),
            (
                lambda path: make_profile(measured_at="2025-01-01T00:00:00Z").save(path),
                "measured more than 180 days ago: run ftmesh selftest here again",
            ),
            (
                lambda path: make_profile(measured_at="2999-01-01T00:00:00Z").save(path),
                "measured in the future, at 2999-01-01",
            ),
        ],
    )
    def test_one_that_is_wrong_is_left_out(self, cache, caplog, spoil, reason):
        path = install_profile(recent())
        spoil(path)
        with caplog.at_level(logging.WARNING):
            plans = [ftmesh.plan(tpus(failed=HOLE)) for _ in range(2)]
        for plan in plans:
            assert plan.network == NETWORKS["v6e"]
            (line,) = [line for line in str(plan).splitlines() if line.startswith("  costs: ")]
            assert line.startswith(f"  costs: not measured (profile {path} rejected: ")
            assert reason in line
        (record,) = caplog.records
        assert reason in record.getMessage()

    def test_folders(self, monkeypatch, tmp_path):
        monkeypatch.delenv(CACHE_VARIABLE)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert profile_folder() == tmp_path / "ftmesh" / "profiles"
        assert install_profile(recent()).parent == profile_folder()
        monkeypatch.setenv(CACHE_VARIABLE, "")
        assert profile_folder() is None
        assert installed_profile(tpus()).profile is None
        with pytest.raises(ArgumentError, match="there is no cache folder to keep the profile in"):
            install_profile(recent())

    def test_a_folder_that_cannot_be_written(self, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
        with pytest.raises(ArgumentError, match="cannot write"):
            install_profile(recent())

    def test_names_of_files_are_harmless(self, cache):
        path = install_profile(recent(device_kind="../../etc/TPU"))
        assert path == cache / "profiles" / "etc-tpu-6x6-wrap-none-1.json"


class TestKernel:
    TOPOLOGY = tpus(failed=HOLE)

    def test_it_is_chosen_for_algorithms_that_passed(self):
        plan = ftmesh.plan(self.TOPOLOGY, link=with_kernel("tree"), payload_bytes=PAYLOAD)
        assert (plan.algorithm, plan.executor) == ("tree", "pallas")
        assert plan.chooses_executor
        assert plan.is_auto
        assert plan.proof is not None
        assert plan.program.executor == "pallas"
        asked = ftmesh.plan(
            self.TOPOLOGY, "tree", link=plan.network, executor="pallas", payload_bytes=PAYLOAD
        )
        assert plan.schedule == asked.schedule  # one that does not wait for rounds

    def test_not_for_others(self):
        """Where it passed for the ring alone, no tree runs in it, and without a pass nothing."""
        for passed in ((), ("ring",), ("tree",)):
            network = with_kernel(*passed).network()
            for payload in (10_000, 1_000_000, PAYLOAD):
                selection = select_algorithm(
                    self.TOPOLOGY, payload, network, with_native=True, with_kernel=True
                )
                kernels = {c.algorithm for c in selection.candidates if c.executor == "pallas"}
                assert kernels <= {*passed}
                assert ("ring" in kernels) == ("ring" in passed)

    def test_not_without_a_profile_nor_for_idle_devices_nor_named_algorithms(self):
        profile = with_kernel("ring", "tree")
        assert ftmesh.plan(self.TOPOLOGY).executor != "pallas"
        assert ftmesh.plan(self.TOPOLOGY, "ring", link=profile).executor == "ppermute"
        assert ftmesh.plan(self.TOPOLOGY, link=profile, executor="ppermute").executor == "ppermute"
        idle = ftmesh.plan(self.TOPOLOGY, link=profile, with_idle=True)
        assert idle.executor == "ppermute"
        tiles = TiledTopology.from_topology(tpus(), "2x1")
        assert ftmesh.plan(tiles, link=profile).executor != "pallas"

    def test_other_payloads_choose_again(self):
        plan = ftmesh.plan(self.TOPOLOGY, link=with_kernel("tree"), payload_bytes=PAYLOAD)
        small = plan.for_payload(4_000)
        assert small.executor == "xla"
        assert small.for_payload(PAYLOAD).executor == "pallas"
        alike = ftmesh.plan(self.TOPOLOGY, link=plan.network, payload_bytes=4_096)
        assert (small.algorithm, small.executor) == (alike.algorithm, alike.executor)

    def test_permutations_after_a_kernel_are_permutations(self):
        """A sibling of a plan that chose the kernel is not forced into it."""
        late = KernelModel(200e-6, 1.0, ("ring",))
        network = replace(with_kernel("ring").network(), collective_launch=1.0, kernel=late)
        plan = ftmesh.plan(self.TOPOLOGY, link=network, payload_bytes=100_000_000)
        assert plan.executor == "pallas"
        assert plan.for_payload(4_096).executor == "ppermute"

    def test_a_reduce_scatter(self):
        quick = KernelModel(1e-6, 1.0, ("ring",))
        network = replace(with_kernel("ring").network(), kernel=quick)
        plan = ftmesh.plan(self.TOPOLOGY, link=network, payload_bytes=PAYLOAD)
        variant = plan.with_reduce_scatter
        assert variant.schedule.owns_evenly
        assert (variant.algorithm, variant.executor) == ("ring", "pallas")
        assert variant.unrolled_variant.executor == "pallas"
        trees = ftmesh.plan(self.TOPOLOGY, link=with_kernel("tree"), payload_bytes=PAYLOAD)
        assert trees.with_reduce_scatter.executor in ("xla", "ppermute")

    def test_it_is_explained(self):
        plan = ftmesh.plan(self.TOPOLOGY, link=with_kernel("ring", "tree"), payload_bytes=PAYLOAD)
        selection = plan.explain()
        assert selection.kernel is None  # it is among the candidates
        assert selection.best.name == f"{plan.algorithm}, pallas"
        text = str(selection)
        assert "ring, pallas" in text
        assert "only on request" not in text
        table = str(ftmesh.plan(self.TOPOLOGY, payload_bytes=PAYLOAD).explain())
        assert "only on request: not measured" in table


class TestCommands:
    def test_link_takes_a_path(self, run, tmp_path):
        path = tmp_path / "profile.json"
        recent().save(path)
        status, out, _ = run("plan", "6x6", "--failed", HOLE, "--link", str(path))
        assert status == 0
        assert "costs: measured on TPU v6e 6x6, 20" in out
        status, _, err = run("plan", "8x8", "--link", str(path))
        assert status == 2
        assert "was measured on TPU v6e 6x6, and this is TPU v6e 8x8" in err
        status, _, err = run("simulate", "v5e:6x6", "--link", str(path))
        assert status == 2
        assert "was measured on TPU v6e 6x6, and not on v5e" in err
        status, _, err = run("limits", "6x6", "--link", str(tmp_path / "none.json"))
        assert status == 2
        assert "cannot read profile" in err


class TestWhatAProfileCannotVouchFor:
    def test_kernels_of_another_jax(self):
        profile = replace(with_kernel("ring"), jax_version="0.8.9")
        costs = find_costs(tpus(failed=HOLE), profile)
        assert costs.network.kernel is None
        assert "; kernels were tried with JAX 0.8.9, and this is " in costs.measured
        assert find_costs(tpus(failed=HOLE), with_kernel("ring")).network.kernel is not None

    def test_sums_of_xla_on_a_whole_mesh(self):
        """It sums over all axes there, and along a ring where chips are missing."""
        costs = find_costs(tpus(), with_kernel("ring"))
        measured, known = with_kernel("ring").network(), NETWORKS["v6e"]
        assert costs.network.all_reduce_efficiency == known.all_reduce_efficiency
        assert costs.network.collective_launch == known.collective_launch
        assert costs.network.device_model == measured.device_model
        assert costs.network.kernel is None
        assert "XLA's sum was timed on a damaged mesh" in costs.measured

    def test_an_empty_variable_turns_profiles_off(self, cache, monkeypatch):
        install_profile(recent())
        topology = tpus(failed=HOLE)
        assert find_costs(topology).measured.startswith("measured on TPU v6e 6x6")
        monkeypatch.setenv(PROFILE_VARIABLE, "")
        assert find_costs(topology) == (NETWORKS["v6e"], "not measured")
