"""The process that runs llama.cpp: settings come in by standard input, the server's URL goes out.

It ends when standard input does, whichever way its parent ends. A wrong file may abort it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def serve(settings: dict[str, Any]) -> Any:
    """Start the server with the settings by which it drafts what was trained."""
    import xllamacpp as x

    f32, threads = x.ggml_type.GGML_TYPE_F32, settings["threads"]
    params = x.CommonParams()
    params.model.path = settings["target"]
    params.hostnames, params.port = ["127.0.0.1"], 0  # a free one
    params.n_parallel = settings["requests"]
    params.n_ctx = settings["requests"] * settings["context"]  # is divided among requests
    params.n_gpu_layers, params.fit_params, params.warmup = 0, False, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_type_k = params.cache_type_v = f32
    params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_prompt, params.cache_ram_mib, params.use_jinja = False, 0, False
    params.verbosity = 1  # errors
    if settings["draft"]:
        speculative, kind = params.speculative, settings["method"].upper()
        types = x.common_speculative_type
        speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_DRAFT_{kind}")]
        draft = speculative.draft
        draft.mparams.path = settings["draft"]
        draft.n_max, draft.n_min, draft.p_min = settings["num_drafts"], 0, 0.0
        draft.n_gpu_layers, draft.backend_sampling = 0, False
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = threads
        draft.cache_type_k = draft.cache_type_v = f32
        params.speculative = speculative  # which is a copy
    return x.Server(params)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp may write to standard output
    server = serve(json.loads(sys.stdin.readline()))
    print(server.listening_address, file=answers, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
