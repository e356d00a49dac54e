"""SGLang 0.5.23's flags as scenario keys.

HiSparse (`--enable-hisparse`) keeps all KV on the host and a device buffer of 2 x top-k rows a request unless
`--hisparse-config` says otherwise; its host pool is `host_to_device_ratio` times the KV on the GPU.
"""

from __future__ import annotations

from hisparsim.launch.command import LaunchError
from hisparsim.launch.notebook import Notebook
from hisparsim.specs.kv_layout import PAGE_TOKENS

DEFAULT_CHUNK_TOKENS = 8192
DEFAULT_BUFFER_FACTOR = 2
"""Device buffer rows over top-k."""
DEFAULT_HOST_RATIO = 2.0
RATIO_KEY = "host_to_device_ratio"
"""A pseudo key of the notebook: the host pool depends on the KV that fits on the GPU."""
_GB = 1e9
_GIB = 2**30


def translate_sglang(book: Notebook, top_k: int) -> None:
    """Change: read every SGLang flag that means something here."""
    _parallel(book)
    share = book.number("mem-fraction-static")
    if share is not None:
        book.set("kv.gpu_memory_utilization", share, "--mem-fraction-static")
        book.set("kv.runtime_reserve_gib", 0.0, "--mem-fraction-static is weights and KV alone")
    _scheduler(book)
    sparse = bool(book.take("enable-hisparse"))
    _kv_dtype(book, sparse)
    if sparse:
        _hisparse(book, top_k)
    else:
        _hicache(book)
    _speculation(book)
    for name, why in (
        ("disable-cuda-graph", "decode steps are priced as graphs"),
        ("pp-size", "pipeline parallelism is not simulated"),
        ("pipeline-parallel-size", "pipeline parallelism is not simulated"),
        ("disaggregation-mode", "prefill and decode apart are not simulated"),
        ("enable-two-batch-overlap", "overlap of two micro-batches is not simulated"),
    ):
        value = book.take(name)
        if value is not None and str(value) != "1":
            book.not_modelled(f"{name} {value}" if value is not True else name, why)


def _parallel(book: Notebook) -> None:
    tp = book.whole("tp-size", "tensor-parallel-size", least=1) or 1
    dp = book.whole("dp-size", "data-parallel-size", least=1) or 1
    ep = book.whole("ep-size", "ep", "expert-parallel-size", least=1) or 1
    attention = book.take("enable-dp-attention")
    if attention:
        if tp % dp:
            raise LaunchError(
                f"--dp-size {dp} does not divide --tp-size {tp}, as --enable-dp-attention needs"
            )
        book.set("parallel.tp", tp // dp, "--tp-size / --dp-size under --enable-dp-attention")
        book.set("parallel.dp", dp, "--dp-size")
        book.set("parallel.ep", True, "--enable-dp-attention shares the experts of all ranks")
        if ep == 1:
            book.notes.append(
                "--enable-dp-attention without --ep-size shards every expert over all ranks; it is priced as "
                "whole experts spread over them (parallel.ep)"
            )
        return
    book.set("parallel.tp", tp, "--tp-size")
    book.set("parallel.dp", dp, "--dp-size")
    if ep > 1:
        book.set("parallel.ep", True, "--ep-size")


def _scheduler(book: Notebook) -> None:
    chunk = book.whole("chunked-prefill-size")
    if chunk is not None and chunk < 1:
        book.not_modelled(
            f"chunked-prefill-size {chunk}", "prompts are computed in chunks; the default is taken"
        )
        chunk = None
    origin = "--chunked-prefill-size" if chunk else "SGLang's default chunk"
    book.set("scheduler.max_num_batched_tokens", chunk or DEFAULT_CHUNK_TOKENS, origin)
    running = book.whole("max-running-requests", least=1)
    if running is not None:
        replicas = int(book.settings["parallel.dp"])
        book.set("scheduler.max_num_seqs", max(running // replicas, 1), "--max-running-requests, a replica")
    window = book.whole("context-length")
    if window is not None:
        book.set("scheduler.max_model_len", window, "--context-length")
    if book.take("disable-overlap-schedule"):
        book.set("scheduler.async_depth", 1, "--disable-overlap-schedule")
    if book.take("disable-radix-cache"):
        book.set("kv.prefix_caching", False, "--disable-radix-cache")
    page = book.whole("page-size")
    if page is not None and page != PAGE_TOKENS:
        book.not_modelled(f"page-size {page}", f"pages of sparse MLA have {PAGE_TOKENS} tokens")


def _kv_dtype(book: Notebook, sparse: bool) -> None:
    dtype = book.take("kv-cache-dtype") or "auto"
    if dtype.startswith("fp8"):
        book.set("kv.dtype", "fp8_ds_mla", "--kv-cache-dtype")
    elif dtype in ("bfloat16", "bf16"):
        book.set("kv.dtype", "bf16", "--kv-cache-dtype")
    elif sparse:
        book.set("kv.dtype", "bf16", "--kv-cache-dtype auto: bf16 on Hopper with HiSparse (fp8 on Blackwell)")


def _hisparse(book: Notebook, top_k: int) -> None:
    config = book.json("hisparse-config")
    book.set("policy.name", "host-resident", "--enable-hisparse")
    book.set("kv.prefix_caching", False, "HiSparse needs the radix cache off")
    wanted = book.as_whole("--hisparse-config.top_k", config.pop("top_k", top_k))
    if wanted != top_k:
        book.not_modelled(f"hisparse-config.top_k {wanted}", f"the model selects {top_k}")
    given = config.pop("device_buffer_size", DEFAULT_BUFFER_FACTOR * top_k)
    rows = book.as_whole("--hisparse-config.device_buffer_size", given)
    book.set("kv.hot_rows", rows, "hisparse-config.device_buffer_size")
    ratio = book.as_number(f"--hisparse-config.{RATIO_KEY}", config.pop(RATIO_KEY, DEFAULT_HOST_RATIO))
    book.set(RATIO_KEY, ratio, "hisparse-config.host_to_device_ratio")
    book.leftover("hisparse-config", config)


def _hicache(book: Notebook) -> None:
    if not book.take("enable-hierarchical-cache"):
        book.set("policy.name", "gpu-only", "no --enable-hisparse")
        return
    book.set("policy.name", "prefix-offload", "--enable-hierarchical-cache")
    size, ratio = book.number("hicache-size"), book.number("hicache-ratio")
    if size:
        ranks = int(book.settings["parallel.tp"])
        book.set("kv.prefix_offload_gib", size * _GB / _GIB * ranks, "--hicache-size, times the ranks")
    elif ratio:
        book.not_modelled(f"hicache-ratio {ratio:g}", "set kv.prefix_offload_gib instead")


def _speculation(book: Notebook) -> None:
    method = book.take("speculative-algorithm", "speculative-algo")
    steps = book.whole("speculative-num-steps")
    drafts = book.whole("speculative-num-draft-tokens")
    width = book.whole("speculative-eagle-topk")
    if method is None:
        return
    tokens = steps or (drafts - 1 if drafts else 1)
    book.set("speculation.draft_tokens", tokens, "--speculative-num-steps")
    if width is not None and width > 1:
        book.not_modelled(f"speculative-eagle-topk {width}", "drafts are one line, not a tree")
    if str(method).upper() not in ("EAGLE", "NEXTN", "EAGLE3"):
        book.not_modelled(f"speculative-algorithm {method}", "drafts are priced as the model's MTP layer")
    book.notes.append("speculation.acceptance is not in a launch line: set it to what the server reports")
