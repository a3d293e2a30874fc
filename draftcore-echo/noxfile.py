"""`nox` runs what CI runs: the tests on the wheel that would be published, then the linters."""

import nox

nox.options.sessions = ["tests", "lint"]
PROJECT = nox.project.load_toml("pyproject.toml")


@nox.session
def tests(session: nox.Session) -> None:
    """draftcore's conformance suites and the tests of your own."""
    session.install(".", *nox.project.dependency_groups(PROJECT, "test"))
    session.run("draftcore", "list-plugins", "--check")
    session.run("pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff and mypy --strict: the package says that it is typed."""
    session.install(".", *nox.project.dependency_groups(PROJECT, "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", "draftcore_echo")
