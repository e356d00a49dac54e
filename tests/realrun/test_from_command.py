"""Launch lines of servers as scenarios, counters as a locality profile, foreign measurements."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hisparsim.cli.app import run as command
from hisparsim.launch import LaunchError, Translation, translate_command
from hisparsim.launch.command import Engine, read_command
from hisparsim.locality.counters import HotCounters, read_counters, write_profile
from hisparsim.locality.profile import ProfileError, load_profile
from hisparsim.specs.scenario import Scenario
from hisparsim_reports.errors import ReportError
from hisparsim_reports.measured import read_measurement

CONNECTOR = """'{"kv_connector": "HiSparseConnector", "kv_role": "kv_both",
  "kv_connector_extra_config": {"host_pool_gib": 384}}'"""
PUBLISHED = f"""
VLLM_LOGGING_LEVEL=INFO vllm serve zai-org/GLM-5.3-FP8 \\
  --tensor-parallel-size 8 --gpu-memory-utilization 0.92 --max-model-len 142k \\
  --max-num-batched-tokens 32768 --max-num-seqs=256 --kv-cache-dtype fp8 \\
  --kv-transfer-config {CONNECTOR} --tool-call-parser glm47 --port 8000
"""


def settings_of(text: str) -> dict[str, object]:
    return dict(translate_command(text).settings)


def named(made: Translation, flag: str) -> bool:
    return any(sentence.startswith(f"--{flag}") for sentence in made.unmodelled)


# -- vLLM -------------------------------------------------------------------------------------------


def test_the_published_vllm_launch_line_becomes_the_default_scenario() -> None:
    made = translate_command(PUBLISHED)
    assert made.unmodelled == ()
    assert made.engine == "vLLM 0.33"
    wanted = Scenario.load(None, ["kv.host_pool_gib=384", "kv.dtype=fp8_ds_mla"]).model_dump(mode="json")
    assert made.scenario().model_dump(mode="json") == wanted
    assert any("VLLM_LOGGING_LEVEL" in note for note in made.notes)


def test_the_file_that_is_printed_is_the_scenario(tmp_path: Path) -> None:
    made = translate_command(PUBLISHED)
    path = tmp_path / "launch.toml"
    path.write_text(made.toml())
    assert Scenario.load(path).model_dump(mode="json") == made.scenario().model_dump(mode="json")


def test_without_a_connector_all_kv_stays_on_the_gpu_and_offloading_is_a_prefix_tier() -> None:
    line = "vllm serve zai-org/GLM-5.3-FP8 -tp 8"
    assert settings_of(line)["policy.name"] == "gpu-only"
    offload = """--kv-transfer-config '{"kv_connector": "OffloadingConnector",
      "kv_connector_extra_config": {"cpu_bytes_to_use": 549755813888, "spec_name": "Tiering"}}'"""
    made = settings_of(f"{line} {offload}")
    assert made["policy.name"] == "prefix-offload"
    assert made["kv.prefix_offload_gib"] == 512


def test_hisparse_inside_a_multi_connector_and_its_buffer_are_found() -> None:
    connectors = [
        {"kv_connector": "HiSparseConnector", "kv_connector_extra_config": {"host_pool_gib": 200}},
        {"kv_connector": "NixlConnector"},
    ]
    config = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}
    made = translate_command(
        f"vllm serve GLM-5.1-FP8 -tp 8 --kv-transfer-config '{json.dumps(config)}' "
        "--attention-config.hisparse_config.device_buffer_size 6144 "
        "--attention-config.hisparse_config.eager_host_mirror false"
    )
    assert made.settings["policy.name"] == "hybrid"
    assert made.settings["kv.host_pool_gib"] == 200
    assert made.settings["kv.hot_rows"] == 6144
    assert named(made, "kv-transfer-config NixlConnector")


def test_drafts_and_expert_parallel_replicas_are_taken_over() -> None:
    made = settings_of(
        "vllm serve GLM-5.3-FP8 --data-parallel-size 8 --enable-expert-parallel --no-async-scheduling "
        """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'"""
    )
    assert (made["parallel.tp"], made["parallel.dp"], made["parallel.ep"]) == (1, 8, True)
    assert made["speculation.draft_tokens"] == 3
    assert made["scheduler.async_depth"] == 1
    assert int(str(made["scheduler.max_num_seqs"])) * 4 <= int(str(made["scheduler.max_num_batched_tokens"]))


@pytest.mark.parametrize(
    "flag",
    [
        "--enforce-eager",
        "--pipeline-parallel-size 2",
        "--kv-cache-dtype int4",
        "--block-size 16",
        "--compilation-config '{\"level\": 3}'",
        "--a-flag-of-the-future",
        "--quantization awq",
        "--scheduling-policy priority",
    ],
)
def test_every_flag_that_is_not_modelled_is_named(flag: str) -> None:
    made = translate_command(f"vllm serve zai-org/GLM-5.3-FP8 -tp 8 {flag} --seed 3")
    name = flag.removeprefix("--").split()[0]
    assert named(made, name), made.unmodelled
    assert not named(made, "seed")
    assert f"NOT MODELLED --{name}" in made.toml()


# -- SGLang -----------------------------------------------------------------------------------------

SGLANG = """sglang serve --model-path zai-org/GLM-5.1-FP8 --tp 8 --dp 8 --enable-dp-attention
  --mem-fraction-static 0.85 --max-running-requests 480 --kv-cache-dtype fp8_e4m3 --disable-radix-cache
  --enable-hisparse --hisparse-config '{"device_buffer_size": 4096, "host_to_device_ratio": 8}'"""


def test_sglang_hisparse_is_host_resident_with_its_ratio_as_a_host_pool() -> None:
    made = translate_command(" ".join(SGLANG.split()))
    settings = made.settings
    assert settings["policy.name"] == "host-resident"
    assert (settings["parallel.tp"], settings["parallel.dp"]) == (1, 8)
    assert settings["scheduler.max_num_seqs"] == 60
    assert settings["kv.hot_rows"] == 4096
    assert settings["kv.dtype"] == "fp8_ds_mla"
    assert settings["kv.prefix_caching"] is False
    assert float(str(settings["kv.host_pool_gib"])) > 8
    made.scenario()


def test_sglang_defaults_are_its_own() -> None:
    made = settings_of("sglang serve --model-path GLM-5.1-FP8 --tp-size 8 --enable-hisparse")
    assert made["scheduler.max_num_batched_tokens"] == 8192
    assert made["kv.hot_rows"] == 4096
    assert made["kv.dtype"] == "bf16"
    plain = settings_of("python -m sglang.launch_server --model GLM-5.1-FP8 --tp 8")
    assert plain["policy.name"] == "gpu-only"
    cached = settings_of(
        "sglang serve --model-path GLM-5.1-FP8 --tp 8 --enable-hierarchical-cache --hicache-size 60"
    )
    assert cached["policy.name"] == "prefix-offload"


# -- lines that are none ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ls -l", "starts no server"),
        ("vllm serve", "no model"),
        ("vllm serve meta-llama/Llama-3-8B", "unknown"),
        ("vllm serve GLM-5.3-FP8 --max-num-seqs many", "whole number"),
        ("vllm serve GLM-5.3-FP8 --kv-transfer-config '{broken'", "JSON"),
        ("vllm serve 'GLM-5.3-FP8", "words"),
    ],
)
def test_what_is_no_launch_line_is_refused_in_one_line(line: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said) as refusal:
        translate_command(line)
    assert "\n" not in str(refusal.value)


PLAIN_VLLM = "vllm serve zai-org/GLM-5 -tp 8"
PLAIN_SGLANG = "python -m sglang.launch_server --model-path zai-org/GLM-5 --tp 8"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("vllm serve zai-org/GLM-5 -tp 0", "tensor-parallel-size '0': at least 1"),
        (f"{PLAIN_VLLM} --max-num-seqs -3", "max-num-seqs '-3': at least 1"),
        (f"{PLAIN_VLLM} --max-num-seqs inf", "whole number"),
        (
            f"""{PLAIN_VLLM} --kv-transfer-config '{{"kv_connector": "HiSparseConnector",
              "kv_connector_extra_config": 5}}'""",
            "kv_connector_extra_config 5: a JSON object",
        ),
        (
            f"""{PLAIN_VLLM} --kv-transfer-config '{{"kv_connector": "HiSparseConnector",
              "kv_connector_extra_config": {{"host_pool_gib": "much"}}}}'""",
            "host_pool_gib 'much': a number",
        ),
        (
            f"""{PLAIN_VLLM} --kv-transfer-config '{{"kv_connector": "MultiConnector",
              "kv_connector_extra_config": {{"connectors": 5}}}}'""",
            "connectors 5: a list",
        ),
        (f"{PLAIN_VLLM} --attention-config.hisparse_config 7", "hisparse_config '7': a JSON object"),
        (
            f"""{PLAIN_VLLM} --speculative-config '{{"num_speculative_tokens": "x"}}'""",
            "num_speculative_tokens 'x'",
        ),
        (f"{PLAIN_SGLANG} --dp 3 --enable-dp-attention", "does not divide"),
        (f"""{PLAIN_SGLANG} --enable-hisparse --hisparse-config '{{"top_k": "a"}}'""", "top_k 'a'"),
        (
            f"""{PLAIN_SGLANG} --enable-hisparse --hisparse-config '{{"host_to_device_ratio": "nan"}}'""",
            "host_to_device_ratio 'nan'",
        ),
    ],
)
def test_a_flag_of_the_wrong_kind_is_named_with_its_value(line: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        translate_command(line)


def test_switches_do_not_swallow_the_model_behind_them() -> None:
    read = read_command(
        "vllm serve --trust-remote-code --enable-expert-parallel GLM-5.3-FP8 --max-num-seqs 8"
    )
    assert (read.engine, read.model) == (Engine.VLLM, "GLM-5.3-FP8")
    assert read.flags == {"trust-remote-code": True, "enable-expert-parallel": True, "max-num-seqs": "8"}


def test_the_command_prints_a_scenario_and_names_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, line = tmp_path / "made.toml", tmp_path / "line.sh"
    line.write_text(PUBLISHED + " \\\n --enforce-eager\n".lstrip())
    assert command(["scenario", "from-command", f"@{line}", "--out", str(path)]) == 0
    assert "not modelled: --enforce-eager" in capsys.readouterr().err
    assert Scenario.load(path).policy.name == "hybrid"
    assert command(["scenario", "from-command", "vllm serve GLM-5.3-FP8 -tp 8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["policy.name"] == "gpu-only"
    assert command(["scenario", "from-command", "nonsense"]) == 2


# -- counters ---------------------------------------------------------------------------------------

METRICS = """# HELP vllm:hisparse_cache_hits_total hits
# TYPE vllm:hisparse_cache_hits_total counter
vllm:hisparse_cache_hits_total{engine="0",model_name="x"} 9.0e6
vllm:hisparse_cache_hits_total{engine="1",model_name="x"} 1.0e6
vllm:hisparse_cache_misses_total{engine="0",model_name="x"} 1.5e6
vllm:hisparse_host_to_device_bytes_total{engine="0"} 1e12
vllm:num_requests_running{engine="0"} 5.0
"""


def test_counters_of_all_engines_are_added_and_earlier_ones_taken_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(METRICS)
    counted = read_counters(path)
    assert counted == HotCounters(10_000_000, 1_500_000, 10**12)
    assert counted.since(HotCounters(1, 2, 3)).misses == 1_499_998
    with pytest.raises(ProfileError, match="restarted"):
        HotCounters(1, 1, 1).since(counted)


@pytest.mark.parametrize("base", ["glm-5.1", "low-overlap"])
def test_the_profile_of_a_server_misses_as_often_as_its_counters_say(tmp_path: Path, base: str) -> None:
    path = tmp_path / "mine.toml"
    counted = HotCounters(hits=10_000_000, misses=1_500_000, h2d_bytes=0)
    write_profile(counted, path, base=base, context_tokens=100_000, hot_rows=4096)
    profile = load_profile(str(path), 2048)
    assert profile.miss_share(100_000, 4096) == pytest.approx(1.5 / 11.5, rel=0.01)
    assert profile.process is None
    assert profile.miss_share(100_000, 8192) < profile.miss_share(100_000, 4096)


def test_a_file_without_counters_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text("vllm:num_requests_running 3\n")
    with pytest.raises(ProfileError, match="HiSparse is off"):
        read_counters(path)
    code = command(
        [
            "scenario",
            "profile-from-counters",
            str(path),
            "--context",
            "1000",
            "--hot-rows",
            "128",
            "--out",
            "x.toml",
        ]
    )
    assert code == 2


# -- foreign measurements ---------------------------------------------------------------------------


def guidellm(path: Path, num_benchmarks: int = 1) -> Path:
    def summary(mean: float) -> dict[str, object]:
        values = {"mean": mean, "median": 0.9 * mean, "percentiles": {"p90": 2 * mean, "p99": 3 * mean}}
        return {"successful": values, "errored": {"mean": 1e9}}

    metrics = {
        "time_to_first_token_ms": summary(400.0),
        "inter_token_latency_ms": summary(20.0),
        "time_per_output_token_ms": summary(29.0),
        "request_latency": summary(5.0),
        "output_tokens_per_second": summary(900.0),
        "request_totals": {"successful": 64, "errored": 0},
    }
    path.write_text(json.dumps({"benchmarks": [{"metrics": metrics, "duration": 12.5}] * num_benchmarks}))
    return path


def test_guidellm_is_read_with_its_inter_token_latency_as_tpot(tmp_path: Path) -> None:
    measured = read_measurement(guidellm(tmp_path / "benchmarks.json"))
    assert measured.source == "GuideLLM"
    assert measured.metrics["ttft_s.mean"] == pytest.approx(0.4)
    assert measured.metrics["ttft_s.p50"] == pytest.approx(0.36)
    assert measured.metrics["tpot_s.p90"] == pytest.approx(0.04)
    assert measured.metrics["e2e_s.p99"] == pytest.approx(15.0)
    assert measured.metrics["output_tokens_per_s"] == 900
    assert measured.metrics["num_finished"] == 64
    assert any("time_per_output_token_ms" in sentence for sentence in measured.definitions)


def test_a_sweep_of_guidellm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="2 benchmarks"):
        read_measurement(guidellm(tmp_path / "benchmarks.json", 2))


TABLE = """model,tp,conc,isl,osl,tput_per_gpu,output_tput_per_gpu,median_ttft,median_tpot,p99_ttft
glm,8,16,1024,1024,250.5,125.0,0.348,0.0264,1.5
glm,8,64,1024,1024,600.0,300.0,0.9,0.04,4.0
"""


def test_a_table_of_points_is_read_by_concurrency(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text(TABLE)
    measured = read_measurement(path, 64)
    assert measured.metrics["ttft_s.p50"] == pytest.approx(0.9)
    assert measured.metrics["tpot_s.p50"] == pytest.approx(0.04)
    assert measured.metrics["output_tokens_per_s"] == pytest.approx(2400)
    assert measured.metrics["total_tokens_per_s"] == pytest.approx(4800)
    for concurrency in (None, 32):
        with pytest.raises(ReportError, match="16, 64"):
            read_measurement(path, concurrency)


def test_milliseconds_in_a_tables_columns_are_heeded(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("concurrency,mean_ttft_ms,mean_tpot_ms\n4,311.6,17.91\n")
    measured = read_measurement(path)
    assert measured.metrics == {
        "ttft_s.mean": pytest.approx(0.3116),
        "tpot_s.mean": pytest.approx(0.01791),
    }


def test_a_table_without_latencies_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ReportError, match="median_ttft"):
        read_measurement(path)


def test_a_server_whose_weights_do_not_fit_is_told_beside_its_scenario(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(["scenario", "from-command", PLAIN_VLLM]) == 0
    captured = capsys.readouterr()
    assert 'weights = "bf16"' in captured.out
    assert "it could not start: the weights of glm-5 in bf16 do not fit h200x8" in captured.err
    assert command(["scenario", "from-command", "vllm serve zai-org/GLM-5-FP8 -tp 8"]) == 0
    assert capsys.readouterr().err == ""


MEASURED = {"duration": 10.0, "completed": 2, "output_throughput": 40.0, "mean_ttft_ms": 900.0}
LISTS = {"ttfts": [1.0, 2.0], "itls": [[0.1, 0.1], [0.1]], "output_lens": [3, 2]}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({**MEASURED, "mean_ttft_ms": -1}, "mean_ttft_ms = -1; no measured"),
        ({**MEASURED, "mean_ttft_ms": math.nan}, "finite"),
        ({**MEASURED, **LISTS, "ttfts": [1.0, math.nan]}, "ttfts, request 1"),
        ({**MEASURED, **LISTS, "itls": [[-9.0], [0.1]]}, "itls, request 0"),
        ({"benchmarks": [5]}, "not a benchmark result"),
        ({"benchmarks": [{"metrics": 5}]}, "not a benchmark result"),
    ],
)
def test_a_measurement_that_no_server_can_make_is_refused(
    document: dict[str, object], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ReportError, match=said):
        read_measurement(file)
