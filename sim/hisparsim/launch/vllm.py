"""vLLM 0.33's flags as scenario keys.

HiSparse is a KV connector there (`kv_connector = HiSparseConnector`, alone or inside a MultiConnector); its
hot buffer is `attention_config.hisparse_config.device_buffer_size`. Without a connector all KV stays on the
GPU.
"""

from __future__ import annotations

from typing import Any

from hisparsim.launch.command import LaunchError
from hisparsim.launch.notebook import Notebook
from hisparsim.specs.kv_layout import PAGE_TOKENS

DEFAULT_BATCHED_TOKENS = 8192
DEFAULT_NUM_SEQS = 1024
"""Of the API server on GPUs of 70 GiB or more."""
_GIB = 2**30
_KV_DTYPES = {
    "auto": "auto",
    "fp8": "fp8_ds_mla",
    "fp8_e4m3": "fp8_ds_mla",
    "fp8_ds_mla": "fp8_ds_mla",
    "bfloat16": "bf16",
    "nvfp4": "nvfp4",
}
_CONNECTORS = {"HiSparseConnector", "OffloadingConnector", "MultiConnector"}


def translate_vllm(book: Notebook) -> None:
    """Change: read every vLLM flag that means something here."""
    _parallel(book)
    _memory(book)
    _scheduler(book)
    _connectors(book)
    _speculation(book)
    for name, why in (
        ("enforce-eager", "decode steps are priced as graphs"),
        ("pipeline-parallel-size", "HiSparse rejects it, and it is not simulated"),
        ("decode-context-parallel-size", "HiSparse rejects it, and it is not simulated"),
        ("enable-dbo", "overlap of two micro-batches is not simulated"),
    ):
        value = book.take(name)
        if value is not None and str(value) != "1":
            book.not_modelled(f"{name} {value}" if value is not True else name, why)


def _parallel(book: Notebook) -> None:
    tp, dp = book.whole("tensor-parallel-size", least=1) or 1, book.whole("data-parallel-size", least=1) or 1
    book.set("parallel.tp", tp, "--tensor-parallel-size")
    book.set("parallel.dp", dp, "--data-parallel-size")
    if book.take("enable-expert-parallel"):
        book.set("parallel.ep", True, "--enable-expert-parallel")


def _memory(book: Notebook) -> None:
    share = book.number("gpu-memory-utilization")
    if share is not None:
        book.set("kv.gpu_memory_utilization", share, "--gpu-memory-utilization")
    dtype = book.take("kv-cache-dtype")
    if dtype is not None:
        if dtype in _KV_DTYPES:
            book.set("kv.dtype", _KV_DTYPES[dtype], "--kv-cache-dtype")
        else:
            book.not_modelled(f"kv-cache-dtype {dtype}", "no such row format here")
    blocks = book.whole("num-gpu-blocks-override")
    if blocks is not None:
        book.set("kv.num_gpu_blocks", blocks, "--num-gpu-blocks-override")
    if book.take("no-enable-prefix-caching"):
        book.set("kv.prefix_caching", False, "--no-enable-prefix-caching")
    book.take("enable-prefix-caching")
    page = book.whole("block-size")
    if page is not None and page != PAGE_TOKENS:
        book.not_modelled(f"block-size {page}", f"pages of sparse MLA have {PAGE_TOKENS} tokens")


def _scheduler(book: Notebook) -> None:
    tokens, seqs = book.whole("max-num-batched-tokens", least=1), book.whole("max-num-seqs", least=1)
    default = "vLLM's default for large GPUs"
    book.set(
        "scheduler.max_num_batched_tokens",
        tokens or DEFAULT_BATCHED_TOKENS,
        "--max-num-batched-tokens" if tokens else default,
    )
    book.set("scheduler.max_num_seqs", seqs or DEFAULT_NUM_SEQS, "--max-num-seqs" if seqs else default)
    window = book.take("max-model-len")
    if window is not None and window != "auto":
        book.flags["max-model-len"] = window
        book.set("scheduler.max_model_len", book.whole("max-model-len"), "--max-model-len")
    if book.take("no-async-scheduling"):
        book.set("scheduler.async_depth", 1, "--no-async-scheduling")
    book.take("async-scheduling")
    book.take("enable-chunked-prefill")


def _connectors(book: Notebook) -> None:
    sparse: dict[str, Any] | None = None
    offloads_gib: float | None = None
    for connector in _flattened(book, book.json("kv-transfer-config")):
        name = connector.pop("kv_connector", None)
        extra = book.as_object(
            "--kv-transfer-config.kv_connector_extra_config", connector.pop("kv_connector_extra_config", None)
        )
        connector.pop("kv_role", None)
        if name == "HiSparseConnector":
            sparse = extra
        elif name == "OffloadingConnector":
            given = extra.pop("cpu_bytes_to_use", 0)
            offloads_gib = book.as_number("--kv-transfer-config.cpu_bytes_to_use", given) / _GIB
            extra.pop("spec_name", None)
            book.leftover("kv-transfer-config.OffloadingConnector", extra)
        elif name is not None:
            book.not_modelled(f"kv-transfer-config {name}", f"known: {', '.join(sorted(_CONNECTORS))}")
        book.leftover(f"kv-transfer-config.{name}", connector)
    size = book.number("kv-offloading-size")
    if size is not None:
        offloads_gib = size
        book.take("kv-offloading-backend")
    attention = book.json("attention-config")
    options = book.as_object("--attention-config.hisparse_config", attention.pop("hisparse_config", None))
    backend = attention.pop("backend", None)
    if backend is not None:
        book.notes.append(f"--attention-config.backend {backend}: kernels are priced by the cost source")
    book.leftover("attention-config", attention)
    if "host_pool_gib" in options:  # builds before the connector had its own configuration
        sparse = {"host_pool_gib": options.pop("host_pool_gib"), **(sparse or {})}
    if sparse is not None:
        _hisparse(book, sparse, options)
    else:
        if options:
            book.leftover("attention-config.hisparse_config", options)
        policy = "gpu-only" if offloads_gib is None else "prefix-offload"
        book.set("policy.name", policy, "no HiSparseConnector" if offloads_gib is None else "offloading")
    if offloads_gib is not None:
        if sparse is None:
            book.set("kv.prefix_offload_gib", offloads_gib, "the offloading connector's size")
        else:
            book.not_modelled(
                "kv-transfer-config OffloadingConnector", "beside HiSparse its prefix tier is not simulated"
            )


def _hisparse(book: Notebook, extra: dict[str, Any], options: dict[str, Any]) -> None:
    book.set("policy.name", "hybrid", "HiSparseConnector")
    pool = extra.pop("host_pool_gib", None)
    if pool is not None:
        gib = book.as_number("--kv-transfer-config.host_pool_gib", pool)
        book.set("kv.host_pool_gib", gib, "host_pool_gib")
    buffer = options.pop("device_buffer_size", None)
    if buffer is not None:
        rows = book.as_whole("--attention-config.hisparse_config.device_buffer_size", buffer)
        book.set("kv.hot_rows", rows, "hisparse_config.device_buffer_size")
    if not options.pop("eager_host_mirror", True):
        book.not_modelled(
            "attention-config.hisparse_config.eager_host_mirror", "rows are mirrored as they are written"
        )
    book.leftover("attention-config.hisparse_config", options)
    book.leftover("kv-transfer-config.HiSparseConnector", extra)


def _flattened(book: Notebook, transfer: dict[str, Any]) -> list[dict[str, Any]]:
    """Query: the connectors of a transfer configuration, those inside a MultiConnector one by one."""
    if not transfer:
        return []
    if transfer.get("kv_connector") != "MultiConnector":
        return [dict(transfer)]
    what = "--kv-transfer-config.kv_connector_extra_config"
    connectors = book.as_object(what, transfer.get("kv_connector_extra_config")).get("connectors", [])
    if not isinstance(connectors, list):
        raise LaunchError(f"{what}.connectors {connectors!r}: a list of JSON objects is needed")
    return [book.as_object(f"{what}.connectors", connector) for connector in connectors]


def _speculation(book: Notebook) -> None:
    config = book.json("speculative-config")
    if not config:
        return
    drafts, method = config.pop("num_speculative_tokens", 1), config.pop("method", "mtp")
    book.set(
        "speculation.draft_tokens",
        book.as_whole("--speculative-config.num_speculative_tokens", drafts),
        "--speculative-config",
    )
    if "mtp" not in str(method):
        book.not_modelled(f"speculative-config.method {method}", "drafts are priced as the model's MTP layer")
    book.notes.append("speculation.acceptance is not in a launch line: set it to what the server reports")
    config.pop("model", None)
    book.leftover("speculative-config", config)
