"""Profiles: the fit finds planted constants, and files are checked before they are used."""

import json
import os
from dataclasses import replace
from datetime import timedelta

import pytest

from ftmesh import ArgumentError, TiledTopology
from ftmesh.algorithms import registry
from ftmesh.algorithms.rings import along_ring_order
from ftmesh.cost.links import KernelModel
from ftmesh.cost.profile import MAX_FILE_BYTES, Profile
from ftmesh.cost.profile_fit import HopTimes, SumLoad, TimedSum, fit_network, fitted_seconds
from ftmesh.planning.chunking import schedule_for
from ftmesh.planning.selection import select_algorithm
from tests.support.profiles import NOW, TRUE, make_profile, timed_sums, tpus, true_seconds

UNSEEN = ("2x1@3,3", "3x2@1,2", "1x1@5,5;1x1@0,3")
OTHER_PAYLOADS = (20_000, 300_000, 5_000_000, 60_000_000)


@pytest.fixture(scope="module")
def exact():
    return make_profile(timed_sums(kernel=True), kernel_passed=("ring", "tree"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("profiles") / "profile.json"
    make_profile().save(path)
    return path.read_text()


class TestFit:
    def test_planted_constants(self, exact):
        network = exact.network()
        model, true = network.device_model, TRUE.device_model
        for name in ("launch", "per_lane", "per_byte", "packing", "clock"):
            assert getattr(model, name) == pytest.approx(getattr(true, name), rel=1e-3), name
        assert model.per_round == 0
        for name in ("bandwidth", "latency", "collective_launch", "all_reduce_efficiency"):
            assert getattr(network, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
        assert network.ring_share == 0.5
        assert network.kernel.launch == pytest.approx(TRUE.kernel.launch, rel=1e-3)
        assert network.kernel.efficiency == pytest.approx(TRUE.kernel.efficiency, rel=1e-3)
        assert network.memory_bandwidth == TRUE.memory_bandwidth
        assert exact.fit_error().worst < 1e-3

    def test_the_time_of_a_round_is_a_launch(self):
        """Cycles of a round and its launch cannot be told apart."""
        model = replace(TRUE.device_model, per_round=3500.0)
        network = make_profile(timed_sums(replace(TRUE, device_model=model))).network()
        assert network.device_model.launch == pytest.approx(6e-6 + 3500 / model.clock, rel=1e-3)

    def test_costs_are_those_of_the_simulator(self, exact):
        """What the fit says of a load is what the cost code says of its schedule."""
        network, topology = exact.network(), tpus(failed="2x2@4,2")
        for executor in ("ppermute", "xla", "pallas"):
            for algorithm in ("ring", "row_pair", "tree"):
                schedule = schedule_for(topology, algorithm, 10**6, TRUE)
                hop = exact.hop_times
                one = TimedSum.from_schedule(schedule, executor, 10**6, (1.0, 1.0, 1.0), hop)
                said = fitted_seconds(one, network, hop)
                assert said == pytest.approx(true_seconds(schedule, executor, 10**6, network))

    def test_links_that_cannot_be_told_apart(self):
        true = replace(TRUE, latency=0.0, bandwidth=5e9, kernel=None, has_kernel=False)
        sums = timed_sums(true, hop_times=False, kind="cpu")
        profile = make_profile(sums, hop_times=None, device_kind="cpu", platform="cpu")
        network = profile.network()
        assert profile.fit_error().worst < 1e-3
        assert network.latency == 0
        assert network.device_model.launch == pytest.approx(6e-6, rel=0.01)
        rate = network.bandwidth * network.all_reduce_efficiency
        assert rate == pytest.approx(5e9 * 0.6, rel=0.01)

    def test_fewer_hops_where_half_of_them_would_take_too_long(self):
        true = replace(TRUE, collective_launch=0.0, ring_share=0.2)
        network = make_profile(timed_sums(true)).network()
        assert network.collective_launch == 0
        assert network.ring_share == pytest.approx(0.2, rel=1e-3)

    def test_noise(self):
        profile = make_profile(timed_sums(noise=0.05, kernel=True), kernel_passed=("ring",))
        error = profile.fit_error()
        assert 0.01 < error.median < 0.06
        assert error.worst < 0.25
        assert str(error).startswith(f"the fit is {error.median:.0%} off in the median, and ")
        launch = profile.network().device_model.launch
        assert launch == pytest.approx(TRUE.device_model.launch, rel=0.2)

    @pytest.mark.slow
    @pytest.mark.parametrize("noise", [0.0, 0.05])
    def test_choices_are_those_of_the_true_network(self, noise):
        """On damages and for payloads that were not timed."""
        sums = timed_sums(noise=noise, kernel=True)
        fitted = make_profile(sums, kernel_passed=("ring", "tree")).network()
        executors = set()
        for failed in UNSEEN:
            for payload in OTHER_PAYLOADS:
                job = tpus(failed=failed), payload
                both = {"with_native": True, "with_kernel": True}
                best = select_algorithm(*job, TRUE, **both).best
                chosen = select_algorithm(*job, fitted, **both).best
                executors.add(chosen.executor)
                seconds = true_seconds(_schedule(chosen, job[0]), chosen.executor, payload)
                assert seconds <= 1.15 * best.seconds
        assert {"xla", "pallas"} <= executors

    def test_the_same_samples_give_the_same_network(self, exact):
        again = replace(exact, jax_version="0.10.0")
        assert again.network() == exact.network()

    def test_too_few_sums(self):
        sums = timed_sums()
        with pytest.raises(ArgumentError, match="0 by XLA, and a fit needs 4 and 2 or more"):
            make_profile(tuple(one for one in sums if one.executor != "xla"))
        few = [one for one in sums if one.executor == "ppermute"][:3]
        with pytest.raises(ArgumentError, match="3 timed sums by permutations"):
            make_profile((*few, *(one for one in sums if one.executor == "xla")))
        with pytest.raises(ArgumentError, match="of which one is 100 times as large as another"):
            make_profile(tuple(one for one in sums if one.payload_bytes <= 65_536))

    def test_tiles_are_not_timed(self):
        tiles = TiledTopology.from_topology(tpus(), "2x1")
        schedule = registry.build_schedule(tiles, "ring")
        with pytest.raises(ArgumentError, match="has tiles: time the sums of its chips"):
            TimedSum.from_schedule(schedule, "ppermute", 1024, (1.0, 1.0, 1.0))


def _schedule(candidate, topology):
    if candidate.schedule is not None:
        return candidate.schedule
    return along_ring_order(topology)


class TestKernel:
    def test_only_for_algorithms_that_passed_and_only_if_it_was_timed(self):
        timed = timed_sums(kernel=True)
        assert make_profile(timed).network().kernel is None
        assert not make_profile(timed).network().has_kernel
        assert make_profile(kernel_passed=("ring",)).network().kernel is None
        kernel = make_profile(timed, kernel_passed=("tree",)).network().kernel
        assert kernel.algorithms == ("tree",)

    @pytest.mark.parametrize(
        ("launch", "efficiency"), [(-1.0, 1.0), (float("nan"), 1.0), (0.0, 0.0)]
    )
    def test_a_model_that_cannot_be(self, launch, efficiency):
        with pytest.raises(ArgumentError, match=r"must be (0 seconds or more|above 0), not"):
            KernelModel(launch, efficiency, ())


class TestUse:
    def test_where_it_was_measured(self):
        profile = make_profile()
        assert profile.obstacle(tpus(failed="2x2@2,2"), NOW) == ""
        assert profile.obstacle(tpus().without_devices(), NOW) == ""
        assert profile.describe(NOW) == "measured on TPU v6e 6x6, 1 day ago"
        assert profile.describe(NOW - timedelta(days=1)) == "measured on TPU v6e 6x6, today"
        assert profile.network().source == "measured on TPU v6e 6x6, 2026-11-17"

    @pytest.mark.parametrize(
        ("topology", "here"),
        [
            (tpus(kind="TPU v5 lite"), "TPU v5e 6x6"),
            (tpus((4, 4)), "TPU v6e 4x4"),
            (tpus((4, 16)), "TPU v6e 4x16 (wrapping in y)"),
            (replace(tpus(), devices_per_chip=2), "TPU v6e 6x6 with 2 devices a chip"),
        ],
    )
    def test_other_chips(self, topology, here):
        says = f"measured on TPU v6e 6x6, and this is {here}: run ftmesh selftest here"
        assert make_profile().obstacle(topology, NOW) == says

    def test_another_version(self):
        version = make_profile().ftmesh_version
        major, minor, *_ = version.split(".")
        for other, fits in ((f"{major}.{minor}.99", True), (f"{major}.{int(minor) + 1}.0", False)):
            obstacle = make_profile(ftmesh_version=other).obstacle(tpus(), NOW)
            said = f"measured with ftmesh {other}, and this is {version}: run ftmesh selftest here"
            assert obstacle == ("" if fits else f"{said} again")

    def test_clocks(self):
        profile = make_profile()
        early = NOW - timedelta(days=3)
        assert profile.obstacle(tpus(), early).startswith("measured in the future, at 2026-11-17T")
        assert not profile.is_stale(NOW + timedelta(days=178))
        assert profile.is_stale(NOW + timedelta(days=180))


def _without(name):
    return lambda data: data.pop(name)


def _with(**changes):
    return lambda data: data.update(changes)


def _first_sum(**changes):
    return lambda data: data["sums"][0].update(changes)


def _load(**changes):
    return lambda data: data["sums"][0]["load"].update(changes)


def _both(one, other):
    return lambda data: (one(data), other(data))


MALFORMED = [
    (_with(format="other"), "its format is not 'ftmesh.profile'"),
    (_with(format_version=2), "its format is ftmesh.profile/2, of a newer version of ftmesh"),
    (_with(format_version="1"), "its format_version is '1', and 1 is known"),
    (_with(format_version=True), "its format_version is True"),
    (_without("shape"), "it lacks 'shape'"),
    (_without("hop_times"), "it lacks 'hop_times'"),
    (_with(command="rm"), "it has unknown 'command'"),
    (_with(device_kind=7), "device_kind must be text, not 7"),
    (_with(device_kind=""), "device_kind must be text, not ''"),
    (_with(device_kind="x" * 201), "device_kind must be printable and have at most 200"),
    (_with(jax_version="\x1b[31m"), "jax_version must be printable"),
    (_with(shape="6x6"), "a list is expected, and not '6x6'"),
    (_with(shape=[6.0, 6]), "shape must be the sizes of the mesh"),
    (_with(shape=[True, 6]), "shape must be the sizes of the mesh"),
    (_with(shape=[6, -6]), "needs one to three axes"),
    (_with(shape=[1000, 900]), "the mesh has more than 16,384 chips"),
    (_with(shape=[10**9, 10**9]), "has more than 1,000,000 chips"),
    (_with(shape=[2, 2]), "block 2x2@2,2"),
    (_with(wrap=[1, 0]), "wrap must have true or false for each axis"),
    (_with(wrap=[True]), "wrap must have true or false for each axis"),
    (_with(devices_per_chip=3), "devices_per_chip must be a whole number from 1 to 2, not 3"),
    (_with(num_devices=-1), "num_devices must be a whole number from 1 to 16,384, not -1"),
    (_with(num_devices=10**30), "num_devices must be a whole number"),
    (_with(num_processes=37), "num_processes must be a whole number from 1 to 36, not 37"),
    (_with(measured_at="yesterday"), "measured_at must be a time in UTC, as .* not 'yesterday'"),
    (_with(measured_at="2026-11-17T11:00:00"), "measured_at must be a time in UTC"),
    (_with(measured_at="2026-11-17T11:00:00+02:00"), "measured_at must be a time in UTC"),
    (_with(measured_at="1970-01-01T00:00:00Z"), "measured_at must be a time in UTC"),
    (_with(hop_times=[1e-6, 1e9]), "hop_times: an object is expected"),
    (_with(hop_times={"latency_s": -1, "bytes_per_s": 1e9}), "latency_s must be a number from 0"),
    (_with(hop_times={"latency_s": 0, "bytes_per_s": 0}), "bytes_per_s must be a number from 1000"),
    (_with(kernel_passed=["magic"]), "kernel_passed must have some of two_dim"),
    (_with(kernel_passed=[["ring"]]), "kernel_passed must have some of two_dim"),
    (_with(kernel_passed=["ring", "ring"]), "each once"),
    (_with(sums={}), "a list is expected, and not {}"),
    (_with(sums=[]), "0 timed sums by permutations and 0 by XLA"),
    (_with(sums=[3]), "sum 0: an object is expected, and not 3"),
    (_with(sums=[3] * 5_001), "it has 5,001 sums, and 5,000 are the most"),
    (_first_sum(executor="shell"), "sum 0: executor must be one of xla, ppermute, pallas, not"),
    (_first_sum(algorithm=["ring"]), "sum 0: algorithm must be one of two_dim"),
    (_first_sum(failed=["2x2@2,2"]), "sum 0: failed must be blocks of chips"),
    (_first_sum(failed="1x1@9,9"), "block 1x1@9,9"),
    (_first_sum(failed="all"), "'all' is not a block"),
    (_first_sum(failed="1x1@0,0;" * 300), "failed must be printable and have at most 2,000"),
    (_first_sum(payload_bytes=1.5), "sum 0: payload_bytes must be a positive whole number"),
    (_first_sum(payload_bytes=2**60), "sum 0: payload_bytes must be a positive whole number"),
    (_first_sum(median_s="fast"), "median_s must be a number from 1e-09 to 3600, not 'fast'"),
    (_first_sum(median_s=True), "median_s must be a number"),
    (_first_sum(median_s=0), "median_s must be a number"),
    (_first_sum(median_s=1e300), "median_s must be a number"),
    (_first_sum(low_s=3000.0), "low_s, median_s and high_s must ascend"),
    (_first_sum(note="x"), "sum 0: it has unknown 'note'"),
    (_load(rounds=-1), "sum 0: load: rounds must be a number from 0 to 1e\\+12, not -1"),
    (_load(links_s=None), "sum 0: load: links_s must be a number"),
    (_first_sum(load=None), "sum 0: load: an object is expected, and not None"),
]


class TestFiles:
    def test_what_is_saved_is_loaded(self, exact, tmp_path):
        path = tmp_path / "profile.json"
        exact.save(path)
        assert Profile.load(path) == exact
        assert Profile.load(path).network() == exact.network()
        bare = make_profile(timed_sums(hop_times=False), hop_times=None)
        bare.save(path)
        assert Profile.load(path) == bare

    @pytest.mark.parametrize(("change", "says"), MALFORMED)
    def test_malformed(self, saved, tmp_path, change, says):
        path, data = tmp_path / "profile.json", json.loads(saved)
        change(data)
        path.write_text(json.dumps(data))
        with pytest.raises(ArgumentError, match=says) as error:
            Profile.load(path)
        assert str(error.value).startswith(f"{path} is not a profile: ")
        assert str(error.value).endswith("; measure it again with ftmesh selftest")

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (b"", "it is not JSON"),
            (b"\xff\xfe{", "it is not JSON"),
            (b"[" * 100_000, "it is not JSON"),
            (b'{"a": ' + b"1" * 10_000 + b"}", "it is not JSON"),
            (b"[]", "its format is not"),
            (b'{"format": NaN}', "it has the number NaN"),
            (b'{"format": "ftmesh.profile", "a": -Infinity}', "it has the number -Infinity"),
            (b'{"format": "ftmesh.profile", "format": 1}', "it has a field twice"),
        ],
    )
    def test_not_even_a_profile(self, tmp_path, content, says):
        path = tmp_path / "profile.json"
        path.write_bytes(content)
        with pytest.raises(ArgumentError, match=says):
            Profile.load(path)

    def test_a_number_beyond_all(self, saved, tmp_path):
        path = tmp_path / "profile.json"
        path.write_text(saved.replace('"latency_s": 1.5e-06', '"latency_s": 1e999'))
        with pytest.raises(ArgumentError, match="latency_s must be a number from 0 to 1, not inf"):
            Profile.load(path)

    def test_what_is_no_file(self, tmp_path):
        huge, pipe = tmp_path / "huge.json", tmp_path / "pipe.json"
        with open(huge, "wb") as file:
            file.truncate(MAX_FILE_BYTES + 1)
        os.mkfifo(pipe)
        for path, says in (
            (tmp_path / "none.json", "No such file"),
            (tmp_path, "Is a directory"),
            (pipe, "it is not a file"),
            ("/dev/zero", "it is not a file"),
            (huge, "it is longer than 4,000,000 bytes"),
            ("a\0b.json", "null"),
        ):
            with pytest.raises(ArgumentError, match=f"cannot read profile .*: .*{says}"):
                Profile.load(path)

    def test_a_folder_that_is_not_there(self, tmp_path):
        with pytest.raises(ArgumentError, match=r"cannot write .*: No such file"):
            make_profile().save(tmp_path / "none" / "profile.json")


class TestPlantedFaults:
    """The tests above would notice: each fault in the samples shows in the fit."""

    def test_lanes_that_are_not_counted(self):
        sums = [replace(one, load=replace(one.load, lanes=0.0)) for one in timed_sums()]
        assert make_profile(tuple(sums)).fit_error().worst > 0.02

    def test_links_at_another_rate(self):
        hop = HopTimes(TRUE.latency, 20 * TRUE.bandwidth)
        slow = [replace(one, load=replace(one.load, links_s=0.0)) for one in timed_sums()]
        assert make_profile(tuple(slow), hop_times=hop).fit_error().worst > 0.02

    def test_a_load_of_nothing(self):
        sums = [replace(one, load=SumLoad()) for one in timed_sums()]
        assert make_profile(tuple(sums)).fit_error().median > 0.2
        with pytest.raises(ArgumentError, match="0 timed sums"):
            fit_network([], None, device_kind="", devices_per_chip=1, kernel_passed=(), source="")
