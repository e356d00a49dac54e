"""Free runs by the wall clock: everybody is served, and the core decides the same when driven again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hisparsim.results.metrics import compute_metrics
from hisparsim.results.records import RequestStatus
from hisparsim.specs.scenario import Scenario
from hisparsim_realrun.engine import RealRun, run_real
from hisparsim_realrun.errors import RealRunError, RunDied
from hisparsim_realrun.geometry import sliced_scenario
from hisparsim_realrun.inputs import read_inputs
from hisparsim_realrun.options import RunOptions
from hisparsim_realrun.ranks import Solo
from hisparsim_realrun.replaying import replay_log, write_real_run
from hisparsim_traces import Trace, conversations, poisson

OPTIONS = RunOptions(threads=1)


def scenario(folder: Path, policy: str, blocks: int, *more: str) -> Scenario:
    settings = [
        "model.preset=tiny-dsa",
        "parallel.tp=1",
        "kv.dtype=bf16",
        f"kv.num_gpu_blocks={blocks}",
        "kv.host_pool_gib=0.03",
        "kv.prefix_offload_gib=0.01",
        "scheduler.max_num_seqs=4",
        "scheduler.max_num_batched_tokens=192",
        "scheduler.max_model_len=512",
        f"policy.name={policy}",
        *more,
    ]
    return sliced_scenario(Scenario.load(None, settings), 3, 2, folder)


def talks() -> Trace:
    return conversations(3, 2, 150, 40, 16, seed=1)


@pytest.mark.parametrize(
    ("policy", "blocks"), [("gpu-only", 16), ("prefix-offload", 9), ("hybrid", 50), ("host-resident", 60)]
)
def test_a_free_run_serves_everybody_and_its_log_is_made_again(policy, blocks, tmp_path):
    run = run_real(scenario(tmp_path, policy, blocks, "workload.concurrency=3"), talks(), OPTIONS)
    result = run.result
    assert (result.requests["status"] == int(RequestStatus.FINISHED)).all()
    assert result.requests["output_tokens"].tolist() == [16] * 6
    assert {len(tokens) for tokens in run.answers.values()} == {16}
    metrics = compute_metrics(result)
    assert metrics.output_tokens_per_s > 0
    spent = sum(result.steps[name] for name in result.steps if name.startswith("cost_"))
    assert np.all(np.abs(spent - result.steps["duration_ns"]) < 2_000_000)
    out = tmp_path / "run"
    write_real_run(run, out)
    verdict = replay_log(out)
    assert verdict.difference is None
    assert verdict.num_decisions == len(run.decisions)
    assert read_inputs(out / "inputs.parquet") == run.inputs


def test_requests_arrive_by_the_clock_and_speculation_uses_the_simulator_s_draws(tmp_path):
    trace = poisson(4, 8.0, 120, 20, seed=2)
    chosen = scenario(tmp_path, "hybrid", 60, "speculation.draft_tokens=2", "speculation.acceptance=0.6")
    run = run_real(chosen, trace, OPTIONS)
    requests = run.result.requests
    assert requests["arrival_ns"].tolist() == np.rint(trace.arrival_s * 1e9).astype(int).tolist()
    assert (requests["first_token_ns"] > requests["arrival_ns"]).all()
    assert requests["output_tokens"].tolist() == [20] * 4
    assert run.result.num_steps < 4 * 20


def test_a_log_that_was_tampered_with_is_found(tmp_path):
    run = run_real(scenario(tmp_path, "hybrid", 50, "workload.concurrency=2"), talks(), OPTIONS)
    out = tmp_path / "run"
    write_real_run(run, out)
    table = pq.read_table(out / "decisions.parquet")
    digests = table["digest"].to_pylist()
    digests[10] ^= 1
    changed = table.set_column(table.schema.get_field_index("digest"), "digest", pa.array(digests))
    pq.write_table(changed, out / "decisions.parquet")
    verdict = replay_log(out)
    assert verdict.difference is not None and verdict.difference.startswith("decision 10")


def test_a_simulation_s_directory_has_no_inputs_to_replay(tmp_path):
    import hisparsim
    from hisparsim.results.directory import write_run

    write_run(hisparsim.simulate(scenario(tmp_path, "hybrid", 50), talks()), tmp_path / "simulated")
    with pytest.raises(RealRunError, match="not the directory of a real run"):
        replay_log(tmp_path / "simulated")


class Ailing(Solo):
    """A device on which something happens in the middle of a run."""

    def __init__(self, error: Exception) -> None:
        super().__init__(OPTIONS)
        self.error = error
        self.num_steps = 0

    def wait(self):
        self.num_steps += 1
        if self.num_steps == 30:
            raise self.error
        return super().wait()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB"), "memory ran out: CUDA out"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "memory ran out: Default"),
        (RunDied("request 3: its hidden state is not finite"), "not finite"),
    ],
)
def test_what_had_finished_is_kept_when_a_run_dies(error, message, tmp_path):
    with pytest.raises(RunDied, match=message) as caught:
        run_real(
            scenario(tmp_path, "hybrid", 50, "workload.concurrency=2"), talks(), OPTIONS, crew=Ailing(error)
        )
    run = caught.value.run
    assert isinstance(run, RealRun)
    statuses = run.result.requests["status"].tolist()
    assert statuses.count(int(RequestStatus.FINISHED)) > 0
    assert statuses.count(int(RequestStatus.UNFINISHED)) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["kv.dtype=nvfp4"], "a real run stores rows as bf16 or fp8_ds_mla"),
        (["kv.host_pool_gib=900"], "GiB are available: lower kv.host_pool_gib"),
        (["locality.profile=no-such"], "no-such"),
        (["policy.indexer_offload=true"], "not offloaded in real runs"),
    ],
)
def test_a_scenario_that_this_machine_cannot_run_is_refused_in_one_line(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_real(scenario(tmp_path, "hybrid", 50, *settings), talks(), OPTIONS)


@pytest.mark.parametrize(
    ("device", "kernels", "message"),
    [
        ("tpu", None, "known are cpu and cuda"),
        ("cpu", "cublas", "known are torch and triton"),
        ("cuda", "torch", "Triton kernels only"),
    ],
)
def test_an_unknown_device_is_refused_with_the_known_ones(device, kernels, message):
    with pytest.raises(RealRunError, match=message):
        Solo(RunOptions(device=device, kernels=kernels))


def test_a_slice_larger_than_the_model_is_refused(tmp_path):
    with pytest.raises(RealRunError, match="tiny-dsa has 14"):
        sliced_scenario(Scenario.load(None, ["model.preset=tiny-dsa", "parallel.tp=1"]), 99, None, tmp_path)
