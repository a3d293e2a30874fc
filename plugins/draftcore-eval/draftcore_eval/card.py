"""The model card of an export: what it is, what was measured of it, how to serve it, as the Hub shows it.

It is made of the export's manifest and of a report of the same weights, and names no folder of this
machine. A card that somebody has edited is left as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from importlib_metadata import PackageNotFoundError, version

from draftcore.contracts.run import OpenDraft
from draftcore.contracts.target import TargetSpec
from draftcore.errors import DraftcoreError, plural
from draftcore.files import EXPORT, read_sealed, regular, write_atomic
from draftcore_eval import serving, speed

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
DATASET = re.compile(rf"hf:({HUB_ID.pattern})(\?[\w.=&%+-]*)?")
SEAL = "\n<!-- made by draftcore, and made anew while nobody edits it: {} -->\n"
DRAFT, TARGET = "<draft>", "<target>"
NOT_MEASURED = "no acceptance was measured: draftcore eval does, and writes it there"


def write_card(
    draft: OpenDraft, folder: Path, report: Mapping[str, Any] | None = None
) -> Sequence[str]:
    """Write an export's README.md, unless it was edited or the report is of other weights.

    Without a report the newest one of these weights is looked for in the draft's folder. Returns lines
    that say so, with the commands that serve and upload the export.
    """
    try:
        manifest = read_sealed(folder / EXPORT)
        weights = manifest["weights"]
    except (ValueError, KeyError):  # altered, or not ours
        return []
    if report is None:
        report = newest_report(draft.folder, weights)
    elif weights_of(report) != weights:
        return []
    file = folder / "README.md"
    if file.exists() and not is_ours(regular(file).read_text(encoding="utf-8")):
        return [f"{'model card':28}  {file} was edited, and is left as it is"]
    drafts = drafts_of(draft, folder, report)
    speeds = speeds_of(draft.folder, weights)
    refused = refusals(draft, folder)
    text = "\n".join(sections(draft, manifest, report, drafts, speeds, refused)) + "\n"
    try:
        write_atomic(file, text + SEAL.format(digest(text)))
    except OSError as error:
        return [f"{'model card':28}  {file} cannot be written: {error.strerror}"]
    measured = f"acceptance length {report['acceptance_length']:.2f}" if report else NOT_MEASURED
    lines = [f"{'model card':28}  {file}: {measured}"]
    lines += [f"not served by {server:14}  {why}" for server, why in refused.items()]
    served = dict(commands(draft, drafts, str(folder), refused))
    served |= {measured["engine"]: measured["command"] for measured in speeds}
    shown = {server: re.sub(r"^(?=\S)", "  ", line, flags=re.M) for server, line in served.items()}
    lines += [f"to serve with {server}:\n{line}" for server, line in shown.items()]
    return [*lines, f"to upload:\n  hf upload <you>/{title(draft, manifest)} {folder}"]


# ---------------------------------------------------------------- what it is made of


def newest_report(folder: Path, weights: str) -> Mapping[str, Any] | None:
    """Return the newest report of a draft with these weights in its folder, or one folder further."""
    found = []
    for file in [*folder.glob("report.json"), *folder.glob("*/report.json")]:
        with suppress(ValueError, KeyError, TypeError, OSError):
            report = json.loads(regular(file).read_text(encoding="utf-8"))
            if weights_of(report) == weights and report["served"]:
                found.append((report["about"]["date"], file, report))
    return max(found)[2] if found else None


def speeds_of(folder: Path, weights: str) -> list[Mapping[str, Any]]:
    """Return what was measured of these weights on engines whose command is known."""
    found = []
    for file in sorted(folder.glob(speed.FILE.format("*"))):
        with suppress(ValueError, KeyError, TypeError, OSError):
            measured = json.loads(regular(file).read_text(encoding="utf-8"))
            if measured["weights"] == weights and measured["command"]:
                speed.advice(measured)
                found.append(measured)
    return found


def weights_of(report: Mapping[str, Any]) -> str | None:
    """Return the digest of the weights that a report is of."""
    return report["about"]["origin"].get("weights")  # type: ignore[no-any-return]


def drafts_of(draft: OpenDraft, folder: Path, report: Mapping[str, Any] | None) -> int:
    """Return how many tokens a round drafts: as many as are advised, else as the draft is set to."""
    if report:
        return int(report["served"]["num_drafts"])
    config = json.loads(regular(folder / "config.json").read_text(encoding="utf-8"))
    spare = not config.get("sample_from_anchor", False)  # a block's first row, which drafts nothing
    return int(getattr(draft.options, "num_drafts", None) or config.get("block_size", 4) - spare)


def versions(*names: str) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    there = dict[str, str]()
    for name in names:
        with suppress(PackageNotFoundError):
            there[name] = version(name)
    return there


def metadata_of(target: TargetSpec) -> Mapping[str, Any]:
    """Return the front matter of the target's own card, of its folder or of the Hub; {} for none."""
    try:
        file = Path(target.path, "README.md")
        if hub_id(target):
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(target.path, "README.md", revision=target.revision))
        front = re.match(r"---\n(.*?)\n---", regular(file).read_text(encoding="utf-8"), re.DOTALL)
        found = yaml.safe_load(front[1]) if front else {}
    except Exception:  # no network, no card, or a damaged one: whatever a library raises over it
        return {}
    return found if isinstance(found, Mapping) else {}


def hub_id(target: TargetSpec) -> str:
    """Return the target's id on the Hub, '' for one in a folder."""
    local = os.path.exists(target.path) or not HUB_ID.fullmatch(target.path)
    return "" if local else target.path


def name_of(target: TargetSpec) -> str:
    return hub_id(target) or Path(target.path).resolve().name


def refusals(draft: OpenDraft, folder: Path) -> dict[str, str]:
    """Return why servers that the algorithm writes for would refuse this export."""
    found = dict[str, str]()
    for kind, _, server in (word.partition(":") for word in sorted(draft.algorithm.capabilities)):
        if kind == "served":
            try:
                draft.algorithm.hook.read_export(
                    folder=folder, server=server, options=draft.options
                )
            except DraftcoreError as error:
                found[server] = str(error).partition("\n")[0]
    return found


def commands(
    draft: OpenDraft, drafts: int, folder: str, refused: Collection[str]
) -> Mapping[str, str]:
    """Return the command of each server that loads the draft, beside a target that transformers reads."""
    target = draft.run.target
    if not target.source:
        return {}
    named = hub_id(target) or TARGET
    if target.revision:
        named += f" --revision {target.revision}"
    if target.source.get("trust_remote_code"):
        named += " --trust-remote-code"
    found = serving.commands(draft.algorithm.capabilities, named, folder, drafts)
    return {server: command for server, command in found.items() if server not in refused}


def last_names(value: Any) -> Any:
    """Return JSON data in which a path is its last part alone; what is on the Hub keeps its name."""
    if isinstance(value, Mapping):
        return {key: last_names(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [last_names(item) for item in value]
    if not isinstance(value, str) or DATASET.fullmatch(value):
        return value
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1]


def strings(value: Any) -> Iterator[str]:
    """Yield the texts in JSON data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from strings(item)


def title(draft: OpenDraft, manifest: Mapping[str, Any]) -> str:
    """Return a name for the draft: its target's last part and its algorithm."""
    _, _, name = name_of(draft.run.target).rpartition("/")
    return re.sub(r"[^\w.-]", "-", f"{name}-{manifest['algorithm']['name']}")


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def is_ours(card: str) -> bool:
    """Say whether a card is as it was written."""
    text, _, rest = card.rpartition(SEAL.partition("{")[0])
    return bool(rest) and SEAL.format(digest(text)) == card[len(text) :]


# ---------------------------------------------------------------- the text


def sections(
    draft: OpenDraft, manifest: Mapping[str, Any], report: Mapping[str, Any] | None, drafts: int,
    speeds: Sequence[Mapping[str, Any]], refused: Collection[str],
) -> Iterator[str]:  # fmt: skip
    """Yield the card's lines."""
    target, algorithm = draft.run.target, manifest["algorithm"]["name"]
    base, own = hub_id(target), metadata_of(target)
    served = commands(draft, drafts, DRAFT, refused)
    yield front_matter(draft, manifest, own, [*served, *(s["engine"] for s in speeds)])
    name = f"[{base}](https://huggingface.co/{base})" if base else f"`{name_of(target)}`"
    yield f"# {title(draft, manifest)}\n"
    yield (
        f"A draft model for speculative decoding with {name}. In each round it proposes a few tokens, and\n"
        "the target checks them in one forward and keeps those that are its own choice: the same text, in\n"
        f"fewer steps. Trained by draftcore, with the algorithm `{algorithm}`."
    )
    yield from serve_section(served, base, report, drafts, speeds)
    yield from acceptance_section(report)
    yield from training_section(manifest)
    plugins = {plugin["dist"]: plugin["version"] for plugin in manifest["plugins"]}
    packages = {**versions("draftcore", "torch", "transformers"), **plugins}
    yield "\n## Versions\n"
    yield ", ".join(f"{name} {number}".strip() for name, number in sorted(packages.items())) + "."
    yield "\n## Licence\n"
    yield licence(own, target)
    yield "\n## Upload\n"
    yield f"In this folder:\n\n```bash\nhf upload <you>/{title(draft, manifest)} .\n```"


def front_matter(
    draft: OpenDraft, manifest: Mapping[str, Any], own: Mapping[str, Any], servers: Iterable[str]
) -> str:
    """Return the metadata that the Hub reads."""
    base, algorithm = hub_id(draft.run.target), manifest["algorithm"]["name"]
    sources = strings(manifest["settings"]["data"].get("train"))
    data = {
        "base_model": base,
        **{key: str(own[key]) for key in ("license", "license_name") if own.get(key)},
        "license_link": link if (link := str(own.get("license_link"))).startswith("http") else "",
        "library_name": "draftcore",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", algorithm, *servers],
        "datasets": [match[1] for match in map(DATASET.fullmatch, sources) if match],
    }
    filled = {key: value for key, value in data.items() if value}
    return f"---\n{yaml.safe_dump(filled, sort_keys=False)}---\n"


def serve_section(
    served: Mapping[str, str], base: str, report: Mapping[str, Any] | None, drafts: int,
    speeds: Sequence[Mapping[str, Any]],
) -> Iterator[str]:  # fmt: skip
    yield "\n## Serve\n"
    for server, command in served.items():
        yield f"With {server}:\n\n```bash\n{command}\n```\n"
    for measured in speeds:
        yield f"With {measured['engine']}:\n\n```bash\n{measured['command']}\n```\n"
        yield f"Measured on {measured['date'][:10]} on {measured['machine']}, {measured['dtype']}, one"
        yield f"request at once, {plural(measured['prompts'], 'prompt')}:\n"
        yield from markdown_table(speed.table(measured))
        yield f"\nBest there: {speed.advice(measured)}.\n"
    if not (served or speeds):
        yield "No server is known that loads this draft beside its target.\n"
        return
    where = "`<draft>` is this repository, or a folder with its files"
    yield where + ("." if base else "; `<target>` is the folder of the target.")
    if not served:
        return
    if not report:
        yield f"\n{drafts} drafts a round are those it was set to: how many are best was not measured."
        return
    rows = serving.table(report["served"])
    gpu = report["served"]["gpu"].upper()
    yield f"\nExpected speed on one {gpu}, beside the target alone. **This is a model**: acceptance was"
    yield "measured (below), the server's times were computed from the sizes of target and draft.\n"
    yield from markdown_table(rows)
    yield f"\n{serving.advice(report['served'])}."


def acceptance_section(report: Mapping[str, Any] | None) -> Iterator[str]:
    yield "\n## Acceptance\n"
    if not report:
        yield "No acceptance was measured. `draftcore eval`, in the run that trained this draft, decodes"
        yield "held-out prompts with it, and makes this card anew."
        return
    about, (low, high) = report["about"], report["acceptance_length_95"]
    length = f"**{report['acceptance_length']:.2f} tokens a round** (95 %: {low:.2f} to {high:.2f})"
    yield f"{length}, the target's own among them.\n"
    rates = report["acceptance_by_position"]
    spread = [f"{low:.2f} to {high:.2f}" for low, high in report["acceptance_by_position_95"]]
    given = report["acceptance_given_before"]
    yield from markdown_table(
        [
            ["drafted position", *(str(k + 1) for k in range(len(rates)))],
            ["accepted, with all before it", *(f"{rate:.2f}" for rate in rates)],
            ["95 % of that", *spread],
            ["accepted, if all before it were", *(f"{rate:.2f}" for rate in given)],
        ]
    )
    asked, data = about["eval"], last_names(str(about.get("data", "")).split(", "))
    key = str(about.get("data_digest", ""))
    key = key if key.isalnum() else digest(key)  # of several sources, or a name
    lossless = (
        f"{report['prompts']} of {report['prompts']} outputs are, token by token, the target's own"
    )
    yield f"\nMeasured on {about['date'][:10]} by real decoding, target and draft, on {about['device']}"
    yield f"({about['dtype']}): {report['prompts']} prompts of `{', '.join(data)}` (digest"
    yield f"`{key}`), {report['tokens']} tokens in {report['rounds']} rounds, at most"
    yield f"{asked['max_new_tokens']} tokens an answer, temperature {asked['temperature']:g},"
    yield f"{report['num_drafts']} drafts a round. Intervals are a bootstrap over prompts. Lossless:"
    yield (lossless if report["lossless"] else "not checked, as answers were sampled") + "."
    if trained := about.get("trained_on"):
        yield f"{trained} of the prompts were trained on: read the figures with care."


def training_section(manifest: Mapping[str, Any]) -> Iterator[str]:
    data, settings = manifest["data"], manifest["settings"]
    names = ", ".join(f"`{name}`" for name in strings(last_names(settings["data"].get("train"))))
    yield "\n## Training\n"
    yield f"- data: {names}: {data['samples']} rows, {data['tokens']} tokens, of which"
    yield f"  {data['loss_tokens']} are learned; digest `{data['fingerprint']}`"
    yield f"- {manifest['step']} of {manifest['total_steps']} steps, {manifest['samples_seen']} rows seen"
    yield f"- target's fingerprint `{manifest['target_fingerprint']}`\n"
    chosen = {
        "algorithm": manifest["algorithm"]["options"],
        "data": settings["data"],
        "train": settings["train"],
    }
    text = yaml.safe_dump(last_names(chosen), sort_keys=False)
    yield f"<details><summary>settings</summary>\n\n```yaml\n{text}```\n\n</details>"


def licence(own: Mapping[str, Any], target: TargetSpec) -> str:
    """Say what the target's card says of its licence, or that it must be looked up."""
    if name := own.get("license_name") or own.get("license"):
        return f"The target's is {name}; this draft was made from it and of its answers."
    base, files = hub_id(target), sorted(Path(target.path).glob("LICENSE*"))
    where = f"https://huggingface.co/{base}" if base else "where the target comes from"
    where = f"{files[0].name}, beside the target" if files else where
    return (
        f"Not known: the target's is to be looked up ({where}), and written above as `license`,\n"
        "before this draft is passed on."
    )


def markdown_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    head, *body = rows
    for row in (head, ["---"] * len(head), *body):
        yield f"| {' | '.join(row)} |"
