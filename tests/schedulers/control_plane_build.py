"""Builds a Kubernetes control plane for tests: `make k8s-control-plane`, about 12 minutes once.

No Debian package has these programs, but Debian 12's source package of Kubernetes has all of the
source, with what it depends on. Compiler and etcd are Debian's, too: unpacked, not installed, with
the machine's own apt under a state of its own. The result is kept in the cache folder.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from keepstep.errors import UsageError
from keepstep.native import criu
from keepstep.native.build import cache_folder, once

SUITE = "bookworm"
BUILT = ("kube-apiserver", "kube-scheduler", "kube-controller-manager")
PROGRAMS = ("etcd", *BUILT)
TREE = "src/k8s.io/kubernetes"
OPENAPI = "pkg/generated/openapi"
PACKAGES = ("golang-1.19-go", "golang-1.19-src", "etcd-server")
# The copy of it in the source crashes on its first custom resource with a compiler from 1.18 on.
REFLECT = "golang-github-modern-go-reflect2-dev"
VERSION = "1.20.2"


def folder() -> Path:
    return cache_folder() / f"kubernetes-{VERSION}-{platform.machine()}"


def missing() -> str:
    """Why there can be no control plane here; empty if there can."""
    if not all((folder() / name).exists() for name in PROGRAMS):
        return "SKIPPED kubernetes: run make k8s-control-plane"
    return ""


def _run(*command: str | Path, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "LC_ALL": "C", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise UsageError(f"{command[0]} {command[1]} failed: {done.stdout[-2000:]}")
    return done.stdout


def _fetch(scratch: Path) -> None:
    """The tree into `gopath`, the rest into `root`."""
    for name in ("state/lists/partial", "cache/archives/partial", "root", "deb", "gopath/src"):
        (scratch / name).mkdir(parents=True)
    (scratch / "status").touch()
    archive = criu.archive()
    (scratch / "sources.list").write_text(
        "".join(
            f"{kind} [signed-by={criu.KEYRING}] {archive} {SUITE} main\n"
            for kind in ("deb", "deb-src")
        )
    )
    config = criu.write_apt_config(scratch)
    env = {"APT_CONFIG": str(config)}
    _run("apt-get", "update", "-qq", cwd=scratch, env=env)
    _run("apt-get", "download", "-qq", *PACKAGES, REFLECT, cwd=scratch / "deb", env=env)
    _run("apt-get", "source", "--download-only", "kubernetes", cwd=scratch / "deb", env=env)
    for package in sorted((scratch / "deb").glob("*.deb")):
        _run("dpkg-deb", "-x", package, scratch / "root", cwd=scratch, env={})
    (source,) = (scratch / "deb").glob("kubernetes_*.dsc")
    tree = scratch / "gopath" / TREE
    tree.parent.mkdir(parents=True)
    _run("dpkg-source", "--no-check", "-x", source, tree, cwd=scratch, env={})
    old = tree / "vendor/github.com/modern-go/reflect2"
    for file in [*old.glob("*.go"), *old.glob("*.s")]:
        file.unlink()
    new = scratch / "root/usr/share/gocode/src/github.com/modern-go/reflect2"
    for file in [*new.glob("*.go"), *new.glob("*.s")]:
        shutil.copy(file, old)


def _openapi_inputs(tree: Path) -> list[str]:
    """Packages that say they want a description: what the source package lacks is made of them."""
    found = set()
    skipped = ("code-generator", "sample-apiserver", "zz_generated", "/testdata/", "_test.go")
    for root in ("pkg", "staging/src/k8s.io"):
        for file in (tree / root).rglob("*.go"):
            name = file.relative_to(tree).as_posix()
            if any(word in name for word in skipped) or not file.is_file():
                continue
            if "+k8s:openapi-gen=" in file.read_text(errors="replace"):
                found.add(str(Path(name).parent))
    return [
        "k8s.io/kubernetes/"
        + (f"vendor/{one.removeprefix('staging/src/')}" if one.startswith("staging/") else one)
        for one in sorted(found)
    ]


def _compile(scratch: Path, out: Path) -> None:
    tree, go = scratch / "gopath" / TREE, scratch / "root/usr/lib/go-1.19"
    env = {
        "GOROOT": str(go),
        "GOPATH": str(scratch / "gopath"),
        "GOCACHE": str(scratch / "gocache"),
        "GO111MODULE": "off",
        "GOFLAGS": "",
        "CGO_ENABLED": "0",
    }
    tool = scratch / "openapi-gen"
    compiler = go / "bin/go"
    command = [compiler, "build", "-o", tool, "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"]
    _run(*command, cwd=tree, env=env)
    command = [tool, "-i", ",".join(_openapi_inputs(tree)), "-p", f"k8s.io/kubernetes/{OPENAPI}"]
    command += ["-O", "zz_generated.openapi", "-o", scratch / "gopath/src"]
    command += ["-h", "hack/boilerplate/boilerplate.generatego.txt", "-r", scratch / "violations"]
    _run(*command, cwd=tree, env={**env, "PATH": f"{go / 'bin'}:{os.environ['PATH']}"})
    flags = ["-s", "-w"]
    for package in ("k8s.io", "k8s.io/kubernetes/vendor/k8s.io"):
        major, minor, _ = VERSION.split(".")
        for name, value in (
            ("gitVersion", f"v{VERSION}"),
            ("gitMajor", major),
            ("gitMinor", minor),
        ):
            flags += ["-X", f"{package}/component-base/version.{name}={value}"]
    for name in BUILT:
        print(f"compiling {name}", flush=True)
        command = [compiler, "build", "-ldflags", " ".join(flags), "-o", out / name]
        _run(*command, f"./cmd/{name}", cwd=tree, env=env)


def _fill(out: Path) -> None:
    # Beside the result, not in /tmp: it takes some gigabytes.
    scratch = out.parent / f".kubernetes-{os.getpid()}"
    scratch.mkdir()
    try:
        print("fetching the source of Kubernetes, a compiler and etcd", flush=True)
        _fetch(scratch)
        _compile(scratch, out)
        shutil.copy(scratch / "root/usr/bin/etcd", out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> int:
    try:
        once(folder(), _fill)
    except (UsageError, OSError) as error:
        print(f"SKIPPED kubernetes: no control plane can be built here: {error}")
        return 1
    print(folder())
    return 0


if __name__ == "__main__":
    sys.exit(main())
