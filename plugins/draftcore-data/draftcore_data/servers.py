"""Commands that start a server of a target, with the parser that separates reasoning from answers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from draftcore.contracts.target import TargetSpec
from draftcore.files import regular

# What a target's `model_type` is and its chat template holds; the reasoning parsers of sglang and vLLM.
PARSERS = [
    (r"gpt_oss", r"", "gpt-oss", "openai_gptoss"),
    (r"qwen3.*", r"enable_thinking|assistant\\n<think>", "qwen3", "qwen3"),
    (r"glm4_moe.*", r"<think>", "glm45", "glm45"),
    (r"deepseek_v3.*", r"\bthinking\b", "deepseek-v3", "deepseek_v3"),
    (
        r".*",
        r"(?s)\uff5cAssistant.*</think>|</think>.*\uff5cAssistant",
        "deepseek-r1",
        "deepseek_r1",
    ),
    (r"kimi_k2.*", r"</think>", "kimi_k2", "kimi_k2"),
    (r"minimax_m2", r"</think>", "minimax", "minimax_m2"),
    (r"nemotron_h", r"</think>", "nemotron_3", "nemotron_v3"),
    (r"gemma4.*", r"enable_thinking", "gemma4", "gemma4"),
]


def server_lines(target: TargetSpec, chat_template: str | None, port: int) -> list[str]:
    """Return a command of sglang and one of vLLM that serve a target, with its template in a file if any.

    A reasoning parser is named where it is known.
    """
    if chat_template is not None:
        template = regular(Path(chat_template)).read_text(encoding="utf-8")
    else:
        template = str(target.load_tokenizer().chat_template)
    kind = str(target.text_config.model_type)
    fits = (p for k, part, *p in PARSERS if re.fullmatch(k, kind) and re.search(part, template))
    parsers = next(fits, ("", ""))
    more = ["--port", str(port)]
    more += ["--revision", target.revision] if target.revision else []
    more += ["--trust-remote-code"] if target.source.get("trust_remote_code") else []
    more += ["--chat-template", chat_template] if chat_template else []
    starts = "python -m sglang.launch_server --model-path", "vllm serve"
    return [
        f"{start} {shlex.join([target.path, *more, *(['--reasoning-parser', name] if name else [])])}"
        for start, name in zip(starts, parsers, strict=True)
    ]
