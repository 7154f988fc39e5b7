"""The part of the command line that prints manifests: its options, and what they make together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from davincirunsdk.manifests import KINDS, NPU, manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from davincirunsdk.manifests.request import Json, Volume

F = TypeVar("F", bound="Callable[..., Any]")

_CHOICES = "davincirunsdk.manifests"
"""Where click's context keeps the options of a manifest: the job itself has no use for them."""

_NOT_FOR_PODS = ("engine", "node_rank")
_OF_JOB = ("nnodes", "resource", "command", "name", "env")
"""Options that a manifest takes up itself, so that the pods' own command does without."""


def _keep(context: click.Context, parameter: click.Parameter, value: object) -> object:
    context.meta.setdefault(_CHOICES, {})[parameter.name] = value
    return value


def _pod_option(*names: str, **settings: Any) -> Callable[[F], F]:
    check: Callable[[Any], object] | None = settings.pop("check", None)

    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> object:
        if check is not None:
            try:
                value = check(value)
            except ValueError as error:
                raise click.BadParameter(str(error)) from None
        return _keep(context, parameter, value)

    return click.option(*names, callback=callback, expose_value=False, **settings)


def manifest_kind(context: click.Context) -> str | None:
    """Tell which manifest is asked for, None for none.

    Raises:
        click.UsageError: None is, but an option of manifests was given.
    """
    kind: str | None = context.meta[_CHOICES]["manifest"]
    if kind is None:
        for name in context.meta[_CHOICES]:
            if _given(context, name):
                raise click.UsageError(f"{_option(context, name)} has no effect without --manifest")
    return kind


def print_manifest(
    context: click.Context,
    kind: str,
    command: Sequence[str],
    *,
    nnodes: int | None,
    nproc_per_node: int | None,
    resource: str,
    grace_period: float,
    name: str | None = None,
    env: dict[str, str] | None = None,
) -> None:
    """Print the manifest that a command line asks for.

    Args:
        context: Of the command.
        kind: One of `KINDS`.
        command: What the nodes are to run.
        nnodes: Nodes, None for one.
        nproc_per_node: Workers per node, None for one per NPU.
        resource: `NPU` or `CPU`.
        grace_period: Seconds from SIGTERM to SIGKILL.
        name: Of the job.
        env: Variables for the workers.

    Raises:
        click.UsageError: An option is missing or has no place in this kind of manifest.
    """
    chosen = dict(context.meta[_CHOICES])
    del chosen["manifest"]
    if kind != "slurm" and not _given(context, "image"):
        raise click.UsageError("--manifest needs --image: what the pods are to run")
    for other in _NOT_FOR_PODS:
        if _given(context, other):
            raise click.UsageError(
                f"--{other.replace('_', '-')} has no use with --manifest, which has one davincirun per pod "
                "find its place by itself: leave it out"
            )
    if resource == "CPU" and nproc_per_node is None:
        raise click.UsageError("--resource CPU needs --nproc-per-node: nothing else tells how many workers")
    patch = _patch(chosen.pop("manifest_patch"))
    # Loaded where it is needed: a job that starts workers has no use for it.
    from davincirunsdk.manifests.request import Request

    try:
        request = Request(
            command=tuple(command),
            options=tuple(_passed_on(context)),
            nnodes=nnodes or 1,
            npus=0 if resource == "CPU" else nproc_per_node or 8,
            nproc_per_node=nproc_per_node,
            name=name or "",
            env=env or {},
            grace_period=grace_period,
            **chosen,
        )
        text = manifest(kind, request, patch)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    click.echo(text, nl=False)


def _passed_on(context: click.Context) -> list[str]:
    """Options for the nodes' own `davincirun`: those that were given and are not the manifest's."""
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in _OF_JOB or name in context.meta[_CHOICES] or not _given(context, name):
            continue
        value = context.params[name]
        option = parameter.opts[-1]
        if value is True:
            words.append(option)
        elif isinstance(parameter, click.Option) and parameter.multiple:
            words += [word for each in value for word in (option, str(each))]
        else:
            words += [option, (",".join(value) or "none") if isinstance(value, tuple) else str(value)]
    return words


def _patch(path: str | None) -> Json:
    if path is None:
        return None
    import json
    from pathlib import Path

    try:
        patch: Json = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--manifest-patch {path} cannot be read as JSON: {error}") from None
    return patch


def _volumes(texts: tuple[str, ...]) -> tuple[Volume, ...]:
    if not texts:
        return ()
    from davincirunsdk.manifests.request import volume

    return tuple(volume(text) for text in texts)


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text!r} is not of the form NAME=VALUE")
        pairs[name] = value
    return pairs


def _given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _option(context: click.Context, name: str) -> str:
    return next(parameter.opts[-1] for parameter in context.command.params if parameter.name == name)


_PAIRS: dict[str, Any] = {"multiple": True, "metavar": "NAME=VALUE", "check": _pairs}
_OPTIONS: list[Callable[[Any], Any]] = [
    _pod_option(
        "--manifest",
        type=click.Choice(KINDS),
        help="Print a job that runs COMMAND on --nnodes nodes of a cluster, and start nothing.",
    ),
    _pod_option("--image", metavar="IMAGE", default="", help="Image of the pods."),
    _pod_option("--namespace", metavar="NAME", default="", help="Namespace of the job."),
    _pod_option(
        "--queue",
        metavar="NAME",
        default="",
        help="Queue of the scheduler; with Slurm, the partition.",
    ),
    _pod_option(
        "--npu-resource",
        metavar="NAME",
        default=NPU,
        help=f"Resource name of the NPUs.  [default: {NPU}]",
    ),
    _pod_option("--shm-size", metavar="SIZE", default="", help="Size of /dev/shm, such as 16Gi."),
    _pod_option(
        "--volume",
        "volumes",
        multiple=True,
        metavar="SOURCE:PATH[:ro]",
        check=_volumes,
        help="Storage to mount: /folder:/path, pvc:CLAIM:/path, nfs:SERVER:/folder:/path or "
        "configmap:NAME:/path.",
    ),
    _pod_option("--label", "labels", help="Label of the job and its pods.", **_PAIRS),
    _pod_option("--node-selector", help="Label that a node must have.", **_PAIRS),
    _pod_option("--image-pull-secret", metavar="NAME", default="", help="Secret for the image."),
    _pod_option("--service-account", metavar="NAME", default="", help="Service account of the pods."),
    _pod_option(
        "--mindcluster",
        metavar="SERIES",
        default="",
        help="For MindCluster: NPU series for the label ring-controller.atlas, such as ascend-910b.",
    ),
    _pod_option("--driver-mounts", is_flag=True, help="Mount the hosts' Ascend driver into the pods."),
    _pod_option(
        "--retries",
        default=0,
        type=click.IntRange(0),
        metavar="N",
        show_default=True,
        help="How often the platform may start the whole job again after a failure.",
    ),
    _pod_option(
        "--manifest-patch",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False),
        help="JSON merge patch for the job, for what no option covers.",
    ),
]


def manifest_options(command: F) -> F:
    """Give a command the options of manifests."""
    for add in reversed(_OPTIONS):
        command = add(command)
    return command
