"""The emulated process group, and the arithmetic of the benchmarks."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import budget, checkpoint, emulation, kernels, models, optimizer
from benchmarks.emulated import Plan, Row
from benchmarks.emulation import Network
from benchmarks.host import measure_host
from benchmarks.measure import Sample, bound, extrapolated
from benchmarks.trace import read, union, without
from benchmarks.trainers import Job
from benchmarks.variants import Variant


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    emulation.stop()


def _group(world: int, network: Network) -> emulation.EmulatedGroup:
    emulation.start(world, network)
    group = init_device_mesh("cpu", (world,)).get_group()
    assert isinstance(group, emulation.EmulatedGroup)
    return group


def test_a_gather_repeats_this_ranks_shard_for_every_rank() -> None:
    group = _group(4, Network(bandwidth=100.0))
    shard, output = torch.randn(3), torch.full((12,), float("nan"))
    group._allgather_base(output, shard)
    assert torch.equal(output, torch.cat([shard] * 4))


def test_a_gather_in_place_repeats_the_slice_that_it_starts_from() -> None:
    group = _group(4, Network(bandwidth=100.0))
    output = torch.randn(12)
    shard = output[:3].clone()
    group._allgather_base(output, output[:3])
    assert torch.equal(output, torch.cat([shard] * 4))


def test_a_free_gather_fills_a_buffer_once_and_then_writes_the_own_slice() -> None:
    group = _group(4, Network())
    output = torch.zeros(8)
    group._allgather_base(output, torch.tensor([1.0, 2.0]))
    assert output.tolist() == [1.0, 2.0] * 4
    group._allgather_base(output, torch.tensor([3.0, 4.0]))
    assert output.tolist() == [3.0, 4.0] + [1.0, 2.0] * 3


def test_a_reduce_scatter_gives_this_ranks_slice() -> None:
    group = _group(4, Network())
    source, output = torch.randn(12), torch.zeros(3)
    group._reduce_scatter_base(output, source)
    assert torch.equal(output, source[:3])


def test_fsdp2_trains_as_one_of_64_ranks_and_its_traffic_is_counted() -> None:
    traffic = emulation.start(64, Network())
    mesh = init_device_mesh("cpu", (64,))
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(p.to_local().numel() == 64 for p in model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    # The last layer stays gathered only if told to: two gathers each, one reduction each.
    received = 64 * 64 * 4 * 63 // 64
    assert traffic.calls == {"all_gather": 6, "reduce_scatter": 3}
    assert traffic.bytes == {"all_gather": 6 * received, "reduce_scatter": 3 * received}


def test_a_two_dimensional_mesh_has_groups_of_its_own_ranks() -> None:
    emulation.start(12, Network(bandwidth=400.0, node_size=4, node_bandwidth=100.0))
    mesh = init_device_mesh("cpu", (3, 4), mesh_dim_names=("replicate", "shard"))
    assert mesh["replicate"].get_group()._ranks == (0, 4, 8)
    assert mesh["shard"].get_group()._ranks == (0, 1, 2, 3)


def test_the_time_of_a_collective_is_latency_plus_bytes_over_bandwidth() -> None:
    network = Network.parse("200", latency=10.0)
    assert network.nanoseconds(1e9, range(8)) == 10_000 + 5_000_000
    assert Network.parse("free").nanoseconds(1e9, range(8)) == 0


@pytest.mark.parametrize(
    "ranks, expected",
    [
        (range(8), ("inside", 450.0)),
        (range(64), ("across", 400.0)),
        # One member per node has an eighth of the node's bandwidth.
        (range(0, 64, 8), ("across", 50.0)),
    ],
)
def test_a_groups_link_is_the_slowest_that_its_ring_passes(
    ranks: range, expected: tuple[str, float]
) -> None:
    assert Network.parse("450/400@8").link(ranks) == expected


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_kernels_compile_and_export_what_is_called() -> None:
    nvcc = shutil.which("nvcc")
    assert nvcc is not None
    library = ctypes.CDLL(str(kernels.build_library((9, 0), nvcc)))
    for name in ("emulation_wire", "emulation_run", "emulation_copy"):
        assert getattr(library, name) is not None


@pytest.mark.parametrize(
    "name, billions", [("1B", 1.10), ("7B", 6.74), ("8B", 8.03), ("70B", 68.98)]
)
def test_models_have_the_number_of_parameters_in_their_name(name: str, billions: float) -> None:
    assert sum(models.unit_elements(models.CONFIGS[name])) / 1e9 == pytest.approx(
        billions, abs=0.01
    )


def test_the_bound_of_7b_at_300_gb_per_second_is_traffic_limited_in_the_backward() -> None:
    sections = {"forward": [46.0], "backward": [98.0], "optimizer": [1.0]}
    network = Network(bandwidth=300.0, latency=0.0)
    least = bound(models.CONFIGS["7B"], 64, network, sections)
    # 6.74e9 elements, 2 bytes gathered twice (the head once) and 4 reduced, 63/64 of them.
    share = 63 / 64 / 300e6
    everything, end = 6738415616, 4096 * 32000
    assert least.forward_traffic == pytest.approx(2 * everything * share, rel=1e-3)
    assert least.backward_traffic == pytest.approx((6 * everything - 2 * end) * share, rel=1e-3)
    expected = 46.0 + least.backward_traffic + 6 * end * share + 1.0
    assert least.total == pytest.approx(expected, rel=1e-3)


def test_times_of_deeper_models_are_extrapolated_by_layers() -> None:
    shallow = Sample([10.0], [5.0], {"forward": [4.0]})
    deep = Sample([18.0], [9.0], {"forward": [7.0]})
    whole = extrapolated(shallow, deep, (4, 8), 48)
    assert (whole.steps, whole.host) == ([98.0], [49.0])
    assert whole.sections == {"forward": [37.0]}


def test_spans_are_merged_and_taken_from_each_other() -> None:
    assert union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)]) == [(0.0, 3.0), (5.0, 6.0)]
    left = without([(0.0, 10.0), (20.0, 30.0)], [(2.0, 3.0), (8.0, 22.0)])
    assert left == [(0.0, 2.0), (3.0, 8.0), (22.0, 30.0)]


def test_a_trace_tells_exposed_communication_from_hidden() -> None:
    def kernel(name: str, start: float, duration: float, stream: int) -> dict[str, object]:
        place = {"ph": "X", "cat": "kernel", "ts": start, "dur": duration}
        return {**place, "name": name, "args": {"stream": stream}}

    reading = read(
        [
            kernel("gemm", 0.0, 1000.0, 7),
            kernel("emulated_all_gather_16", 500.0, 1500.0, 20),
            kernel("gemm", 2000.0, 1000.0, 7),
            kernel("emulated_reduce_scatter_16", 3500.0, 500.0, 21),
        ]
    )
    assert (reading.span, reading.compute, reading.communication) == (4.0, 2.0, 2.0)
    assert (reading.exposed, reading.idle) == (1.5, 0.5)
    assert [(gap.length, gap.while_communicating) for gap in reading.longest] == [(1000.0, 1000.0)]


def test_variants_are_read_from_their_names() -> None:
    variant = Variant.parse("ours@flat+carve=8+set_depth=2+set_many=[1,true]")
    assert variant.implementation == "ours"
    assert (variant.flags, variant.carve) == (frozenset({"flat"}), 8)
    assert variant.setters == (("set_depth", (2,)), ("set_many", (1, True)))
    with pytest.raises(ValueError, match="setter needs NAME=VALUE"):
        Variant.parse("ours@set_depth")
    with pytest.raises(ValueError, match="no implementation 'theirs'"):
        Variant.parse("theirs")


def test_host_time_of_plain_and_fsdp2_is_split_by_phase_on_a_cpu() -> None:
    config = models.config_of("tiny", layers=2)
    job = Job(config, 1, 8, 64, torch.device("cpu"))
    plain = measure_host(job, Variant.parse("plain"), steps=1, warmup=1)
    assert plain.phases == {}
    sharded = measure_host(job, Variant.parse("fsdp2"), steps=2, warmup=1)
    groups = len(models.unit_elements(config))
    assert sharded.phase_calls["collectives"] == 3 * groups - 1
    named = {"root", "pre-forward", "post-forward", "pre-backward", "post-backward", "collectives"}
    assert sharded.phases.keys() == named
    assert sharded.parts.keys() == {"forward", "backward", "optimizer"}


def test_one_rank_of_many_plans_for_all_and_gets_its_own_pieces_back(tmp_path: Path) -> None:
    job = Job(models.config_of("tiny"), 1, 8, 5, torch.device("cpu"))
    record = checkpoint.measure(job, "tiny:8", "ours", tmp_path, full=True)
    elements = sum(models.unit_elements(job.config))
    assert record["restored"]
    # Master weights and two states of AdamW, and padding.
    assert 1.0 <= record["shard"] / (3 * 4 * elements / 5) < 1.05
    assert 0 < record["save_planning_s"] < record["save_s"]
    metadata = FileSystemReader(tmp_path / "step_000002").read_metadata().state_dict_metadata
    for name, parameter in models.on_meta(job.config).named_parameters():
        entry = metadata[f"model.{name}"]
        assert isinstance(entry, TensorStorageMetadata)
        assert sum(chunk.sizes.numel() for chunk in entry.chunks) == parameter.numel()


def test_clip_and_optimizer_are_held_against_the_bytes_they_must_move() -> None:
    job = Job(models.config_of("tiny"), 1, 8, 64, torch.device("cpu"))
    record = optimizer.measure(job, Variant.parse("ours@flat"), rate=1e6)
    elements = sum(models.unit_elements(job.config))
    # 40 bytes per owned element at 1 MB/s, in ms.
    assert record["bound_ms"] == pytest.approx(40 * elements / 64 / 1e3, rel=1e-3)
    assert record["ratio"] == pytest.approx(record["ms"] / record["bound_ms"])
    assert record["clip"]["collectives"] == {"all_reduce": 1}
    assert record["optimizer"]["collectives"] == {}
    assert record["tensors"] == len(models.unit_elements(job.config))


def test_a_budget_is_lowered_until_no_more_is_reserved_than_by_fsdp2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A budget takes a tenth more than its bytes here; FSDP2 reserves 15 GiB and ours 13."""

    def sample(row: object, variant: Variant, plan: object) -> Sample:
        given = dict(variant.setters).get("set_resident_budget", (0,))[0] / 2**30
        reserved = 15.0 if variant.implementation == "fsdp2" else 13.0 + 1.1 * given
        return Sample([], [], reserved=reserved)

    monkeypatch.setattr(budget, "_sample", sample)
    row, plan = cast(Row, None), cast(Plan, None)
    assert 1.7 < budget.fitting_budget(row, "ours@flat", plan) / 2**30 <= 2 / 1.1
