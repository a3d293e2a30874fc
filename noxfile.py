"""Every job of the project: `nox -l` lists them, `nox -s tests` is what CI runs.

One base environment (.nox/base) holds torch and every third-party package, once. A session's own
environment is a few kilobytes: it sees the base through a .pth file and installs the wheels under
test, so a plugin is tested with its wheel and the core's alone, and torch is unpacked once.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import sys
import zipfile
from pathlib import Path

import nox

ROOT = Path(__file__).parent
BASE = ROOT / ".nox" / "base"
DIST = ROOT / "dist"
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
KINDS = ("algorithm", "store", "capture", "channel", "launcher", "graph", "graph-plugin")
SERVED = ("draftcore-mooncake",)  # plugins whose servers a run depends on
WAITING = ("draftcore-mooncake", "draftcore-sdk")  # their tests wait for processes
LIBRARY = "draftcore-nn"  # for authors of algorithms; it offers no plugin
KIT = ("draftcore-sdk", "draftcore-sharedfs", "draftcore-shm")  # tests of the core use them
SGLANG = ROOT / "plugins" / "draftcore-sglang"
PROJECTS = [ROOT, *(ROOT / "plugins" / name for name in PLUGINS)]
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/plugins/*/pyproject.toml"))
UNMARKED = "not gpu and not long and not sglang"
GROUPS = ("lint", "typing", "test", "release")
QUICKSTART = "examples/quickstart/eagle3.yaml"
BARE = {"venv_params": ["--without-pip"]}  # the base has pip: seconds less for each environment

nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]


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


def base_python(session: nox.Session) -> str:
    """Make the base environment if its requirements changed; return its interpreter."""
    wanted = requirements()
    pins = (ROOT / "constraints.txt").read_text()
    key = hashlib.sha256(json.dumps([wanted, pins, sys.version]).encode()).hexdigest()
    mark, python = BASE / "made-for", BASE / "bin" / "python"
    if not mark.exists() or mark.read_text() != key:
        shutil.rmtree(BASE, ignore_errors=True)
        session.run_install(sys.executable, "-m", "venv", str(BASE), external=True)
        install = (str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check")
        quick = ("--no-compile", "-c", "constraints.txt")  # most modules are never imported
        session.run_install(*install, *quick, *wanted, external=True)
        mark.write_text(key)
    return str(python)


def borrow_base(session: nox.Session) -> None:
    """Let this session's environment see the packages of the base."""
    base_python(session)
    tail = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    (Path(session.virtualenv.location) / tail / "base.pth").write_text(f"{BASE / tail}\n")


def install_wheels(session: nox.Session, *names: str) -> None:
    """Install the wheels of these dists and of those of ours that they require, and nothing else."""
    borrow_base(session)
    build_wheels(session)
    wheels = [str(next(DIST.glob(f"{n.replace('-', '_')}-[0-9]*.whl"))) for n in ours(*names)]
    session.install("-q", "--no-deps", "--force-reinstall", *wheels)


def install_debian_packages(session: nox.Session, project: Path) -> None:
    """Install the system libraries that a dist's dependencies link but do not bring along."""
    wanted = nox.project.load_toml(project / "pyproject.toml").get("tool", {}).get("draftcore", {})
    for package in wanted.get("debian-packages", []):
        state = ("dpkg-query", "-W", "-f", "${Status}", package)
        found = session.run(*state, external=True, silent=True, success_codes=[0, 1])
        if "ok installed" not in str(found):
            session.run_install("apt-get", "-qq", "update", external=True)
            session.run_install("apt-get", "-qq", "install", "-y", package, external=True)


def install_with_servers(session: nox.Session, *others: str) -> None:
    """Install the core's wheel and those of stores and channels, with the servers that stores need."""
    for name in SERVED:
        install_debian_packages(session, ROOT / "plugins" / name)
    install_wheels(session, *SERVED, *KIT, *others)


def install_sglang(session: nox.Session) -> None:
    """Install sglang and its platform for CPUs; 1.4 GB, so kept until the list changes."""
    install_debian_packages(session, ROOT / "plugins" / "draftcore-mooncake")
    install_wheels(session, *PLUGINS)
    needs = SGLANG / "tests" / "sglang-cpu.txt"
    mark = Path(session.virtualenv.location) / "made-for"
    key = hashlib.sha256(needs.read_bytes() + sys.version.encode()).hexdigest()
    if not mark.exists() or mark.read_text() != key:
        session.install("-q", "--no-deps", "--no-compile", "-r", str(needs))
        mark.write_text(key)
    platform = str(SGLANG / "tests" / "platform")
    session.install("-q", "--no-deps", "--no-build-isolation", "--force-reinstall", platform)


def ours(*names: str) -> list[str]:
    """These dists of ours and all dists of ours that they require."""
    found: list[str] = []
    todo = list(names)
    while todo:
        if (name := todo.pop(0)) not in found:
            found.append(name)
            folder = ROOT if name == "draftcore" else ROOT / "plugins" / name
            lines = nox.project.load_toml(folder / "pyproject.toml")["project"]["dependencies"]
            todo += [line.split(">")[0] for line in lines if line.startswith("draftcore")]
    return found


_built = False


def build_wheels(session: nox.Session) -> None:
    """Build every dist into dist/, once per nox call."""
    global _built
    if _built:
        return
    python = base_python(session)
    shutil.rmtree(DIST, ignore_errors=True)
    for project in PROJECTS:
        build = (python, "-m", "build", "-q", "--no-isolation", "--outdir", str(DIST), str(project))
        session.run_install(*build, external=True)
    _built = True


def pytest(session: nox.Session, *args: str, mark: str = UNMARKED, workers: int = 3) -> None:
    # As many workers as CI has cores, of one thread each, and one more where tests wait for processes.
    # A safe path tests the wheels and not the source tree, which `python -m` would put first.
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONSAFEPATH": "1"}
    command = ("python", "-m", "pytest", "-q", "-n", str(workers), "--dist=worksteal", "-m", mark)
    session.run(*command, *args, env=env)


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
        points = data.get("entry-points", {}).get("draftcore", {})
        if points:
            lines = "".join(f"{name} = {module}\n" for name, module in points.items())
            (info / "entry_points.txt").write_text(f"[draftcore]\n{lines}")
    return folder


# ---------------------------------------------------------------- what CI runs


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Everything that a change must pass."""
    plugins = [f"plugin({name})" for name in PLUGINS]
    written = [f"scaffold({kind})" for kind in KINDS]
    alone = ("lint", "typing", "wheels", "start", "core", *plugins)
    for name in (*alone, "together", "faults", "thirdparty", "sglang", *written):
        session.notify(name)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """ruff check and ruff format --check over the repository."""
    python = base_python(session)
    session.run(python, "-m", "ruff", "check", ".", external=True)
    session.run(python, "-m", "ruff", "format", "--check", ".", external=True)


@nox.session(venv_backend="none")
def typing(session: nox.Session) -> None:
    """mypy --strict on the core and its tests, on every plugin and on the examples of plugins."""
    python = base_python(session)
    folders = [str(path / path.name.replace("-", "_")) for path in (*PROJECTS[1:], *EXAMPLES)]
    folders += map(str, ROOT.glob("examples/plugins/*.py"))
    env = {"MYPYPATH": os.pathsep.join(map(str, EXAMPLES))}  # the configuration knows none of them
    session.run(python, "-m", "mypy", "draftcore", "tests", *folders, external=True, env=env)


@nox.session(venv_backend="none")
def wheels(session: nox.Session) -> None:
    """Build every dist and check what ships: typed, entry point, no tests, valid metadata."""
    build_wheels(session)
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
    session.run(base_python(session), "-m", "twine", "check", "--strict", *archives, external=True)


@nox.session(**BARE)
def start(session: nox.Session) -> None:
    """list-plugins and --help stay quick with every plugin installed.

    Machines differ and are shared, so the limits are multiples of the processor time that importing
    click, pluggy and importlib_metadata takes.
    """
    install_wheels(session, *PLUGINS)
    python, draftcore = (str(Path(session.bin) / name) for name in ("python", "draftcore"))
    commands = {
        "floor": (python, "-c", "import click, pluggy, importlib_metadata"),
        "list-plugins": (draftcore, "list-plugins"),
        "--help": (draftcore, "--help"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(15):  # in turn, so that a change of the machine's speed meets all alike
        for name, command in commands.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            session.run(*command, silent=True, log=False)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            seconds[name].append(spent)
    least = {name: min(values) for name, values in seconds.items()}  # others' work only adds
    for name, limit in (("list-plugins", 1.75), ("--help", 1.9)):
        ratio = least[name] / least["floor"]
        session.log(f"draftcore {name}: {1e3 * least[name]:.0f} ms, {ratio:.2f} x floor")
        if ratio > limit:
            session.error(f"draftcore {name} takes {ratio:.2f} x floor, the limit is {limit}")


@nox.session(**BARE)
def core(session: nox.Session) -> None:
    """The core's own tests, with the kit; that it needs no plugin, `thirdparty` shows."""
    install_wheels(session, *KIT)
    apart = [f"--ignore=tests/{name}" for name in ("together", "thirdparty", "faults", "soak")]
    pytest(session, "tests", *apart, *session.posargs)


@nox.session(**BARE)
@nox.parametrize("name", PLUGINS, ids=PLUGINS)
def plugin(session: nox.Session, name: str) -> None:
    """One plugin's wheel, the core's and those that it, or its tests, depend on; nothing else."""
    data = nox.project.load_toml(ROOT / "plugins" / name / "pyproject.toml")
    needs = data.get("dependency-groups", {}).get("test", [])
    install_debian_packages(session, ROOT / "plugins" / name)
    install_wheels(session, name, *(need for need in needs if need.startswith("draftcore")))
    session.run("draftcore", "list-plugins", "--check")
    pytest(session, f"plugins/{name}/tests", *session.posargs, workers=2 + (name in WAITING))


@nox.session(**BARE)
def together(session: nox.Session) -> None:
    """Every wheel in one environment: the tests that train, decode and export."""
    install_wheels(session, *PLUGINS)
    session.run("draftcore", "list-plugins", "--check")
    pytest(session, "tests/together", "tests/soak", *session.posargs)


@nox.session(**BARE)
def faults(session: nox.Session) -> None:
    """Processes of real runs are killed, frozen and lied to; the weights must count every use once."""
    install_with_servers(session, "draftcore-sglang")
    pytest(session, "tests/faults", *session.posargs)


@nox.session(**BARE)
def sglang(session: nox.Session) -> None:
    """sglang itself on the CPU, unmodified: its captures, and what it reads of our exports."""
    install_sglang(session)
    # In one process, as each further one would import sglang anew; one by one, as it has globals.
    for name in (SGLANG.name, "draftcore-tools", "draftcore-data"):
        tests = (f"plugins/{name}/tests", "-n", "0")
        pytest(session, *tests, *session.posargs, mark="sglang and smoke")


@nox.session(**BARE, reuse_venv=False)
@nox.parametrize("kind", KINDS, ids=KINDS)
def scaffold(session: nox.Session, kind: str) -> None:
    """What `draftcore new-plugin` writes, as its author would have it: built, installed, tested."""
    install_wheels(session, "draftcore-sdk", LIBRARY)
    folder = Path(session.create_tmp()) / "written"
    shutil.rmtree(folder, ignore_errors=True)
    name, project = f"my-{kind}", folder / f"draftcore-my-{kind}"
    session.run("draftcore", "new-plugin", name, "--kind", kind, "--out", str(folder))
    build = (base_python(session), "-m", "build", "-q", "--no-isolation", str(project))
    session.run_install(*build, external=True)
    session.install("-q", "--no-deps", *map(str, project.glob("dist/*.whl")))
    session.run("draftcore", "list-plugins", "--check")
    # By the settings that it brings, with a safe path: the wheel is tested, not the folder.
    command = ("python", "-P", "-m", "pytest", "-q", str(project), *session.posargs)
    session.run(*command, env={"OMP_WAIT_POLICY": "PASSIVE"})


@nox.session(**BARE)
def thirdparty(session: nox.Session) -> None:
    """Plugins come and go by pip, one of them from a dist that nothing here knows; its own tests."""
    install_wheels(session, "draftcore-sdk", LIBRARY)
    examples = ROOT / ".nox" / "examples"
    shutil.rmtree(examples, ignore_errors=True)
    for project in EXAMPLES:
        build = ("-m", "build", "-q", "--wheel", "--no-isolation", "--outdir", str(examples))
        session.run_install(base_python(session), *build, str(project), external=True)
    session.install("-q", "--no-deps", "--force-reinstall", *map(str, examples.glob("*.whl")))
    session.env["DRAFTCORE_WHEELS"] = os.pathsep.join([str(DIST), str(examples)])
    tests = [str(project / "tests") for project in EXAMPLES]
    pytest(session, "tests/thirdparty", *tests, *session.posargs)


# ---------------------------------------------------------------- what CI does not run


@nox.session(**BARE)
def quickstart(session: nox.Session) -> None:
    """Capture, train, evaluate and export on this machine's CPU; prints the run's folder."""
    install_wheels(session, *PLUGINS)
    session.run("python", "examples/quickstart/quickstart.py", QUICKSTART, *session.posargs)


@nox.session(**BARE)
def soak(session: nox.Session) -> None:
    """Damage, lies, floods, kills and freezes at random, for an hour; writes docs/reliability.md's table.

    SOAK_CASES is how many of each kind are tried, DRAFTCORE_SOAK in how many runs processes are killed;
    DRAFTCORE_SEED=N repeats the moments that one of these printed.
    """
    install_with_servers(session, *(name for name in PLUGINS if name not in SERVED))
    figures = Path(session.create_tmp()).resolve() / "figures.jsonl"
    figures.unlink(missing_ok=True)
    session.env["SOAK_FIGURES"] = str(figures)
    session.env.setdefault("SOAK_CASES", "300")
    session.env.setdefault("DRAFTCORE_SOAK", "200")
    pytest(session, "tests/soak", *session.posargs)
    pytest(session, "tests/faults", "-s", "-k", "random", *session.posargs, mark="long")
    rows: dict[str, tuple[int, str]] = {}
    for what, tried, found in map(json.loads, figures.read_text().splitlines()):
        rows[what] = rows.get(what, (0, ""))[0] + tried, found
    lines = [f"| {what} | {tried} | {found} |\n" for what, (tried, found) in rows.items()]
    page = ROOT / "docs" / "reliability.md"
    head, bar, _ = page.read_text().partition("|---|---|---|\n")
    page.write_text(head + bar + "".join(lines))


@nox.session(**BARE, name="bench-transport")
def bench_transport(session: nox.Session) -> None:
    """Measure stores against their aims; `-- --only shm,write` measures some."""
    install_with_servers(session, "draftcore-eagle3")
    env = {"OMP_WAIT_POLICY": "PASSIVE"}
    session.run("python", "benchmarks/transport.py", *session.posargs, env=env)


@nox.session(name="sglang-full", venv_backend="none")
def sglang_full(session: nox.Session) -> None:
    """The session `sglang` with every test that runs sglang on a CPU."""
    session.notify("sglang", posargs=("-m", "sglang and not gpu", *session.posargs))


@nox.session(venv_backend="none")
def full(session: nox.Session) -> None:
    """Everything that runs without a GPU: the tests, another project's loader, the quickstart."""
    # First, as a session is queued once: `tests` asks for `sglang` with its smoke only.
    for name in ("sglang-full", "tests", "long", "speculators", "quickstart"):
        session.notify(name)


@nox.session(**BARE)
def long(session: nox.Session) -> None:
    """The tests that take too long for every change: drills, and a compiler's conformance."""
    install_with_servers(session, *(name for name in PLUGINS if name not in SERVED))
    plugins = (f"plugins/draftcore-{name}/tests" for name in ("graphs", "ray"))
    pytest(
        session,
        "tests/faults",
        "tests/together",
        *plugins,
        *session.posargs,
        mark="long and not gpu",
    )


@nox.session(**BARE)
def speculators(session: nox.Session) -> None:
    """Load exports in speculators 0.9.0, through its converters: our logits, and what `verify` says."""
    install_wheels(session, *PLUGINS)
    others = [
        "pydantic-settings",
        "loguru",
        "typer",
        "openai",
        "httpx",
        "psutil",
        "protobuf",
        "aiohttp",
    ]
    session.install("-q", "-c", "constraints.txt", "datasets", *others)
    session.install("-q", "--no-deps", "speculators==0.9.0", "hs-connectors==0.9.0")
    files = ("speculators_check.py", "speculators_verify_check.py")
    pytest(session, *(f"tests/together/{file}" for file in files), *session.posargs)


@nox.session(venv_backend="none")
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
    session.run(*command, *session.posargs, env=env, external=True)
