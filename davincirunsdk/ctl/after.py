"""Commands about jobs that are over: `report`, `bundle`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from davincirunsdk.ctl.asked import FAULT, events_of, fail, plain
from davincirunsdk.ctl.jobs import running_jobs


@click.command()
@click.argument("job")
@click.option(
    "--html",
    type=click.Path(dir_okay=False),
    help="Write the run report, a page for a browser, to this file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--lang", type=click.Choice(["en", "zh"]), help="Language of the report.  [default: the locale's]"
)
def report(job: str, html: str | None, as_json: bool, lang: str | None) -> None:
    """Explain why a job failed.

    JOB is a running job, or of one that is over its log folder, which may be torchrun's or msrun's, too, or
    its id where that is ./log.
    """
    folder, events = Path(job), None
    if not os.path.exists(folder):
        events = events_of(job)
        folder = events.parent
    if html is not None:
        from davincirunsdk.documents import write_page

        found = (
            [events] if events is not None else sorted(folder.glob("*-events.jsonl"), key=os.path.getmtime)
        )
        if not found:
            fail(f"{folder} holds no events file of davincirun: expected <job>-events.jsonl", FAULT)
        write_page(Path(html).absolute(), found[-1])
        click.echo(f"the run report is in {html}")
        return
    from davincirunsdk.diagnosis.explain import explain_folder
    from davincirunsdk.output.run_record import read_record

    try:
        named = None if events is None else read_record(events).job
        explained = explain_folder(folder, job=named, lang=lang)
    except (OSError, ValueError) as error:
        fail(str(error), FAULT)
    running = next((one for one in running_jobs() if one.events == events), None)
    if running is not None and not explained.failures and not as_json:
        click.echo(f"job {plain(str(running))} runs, and none of its workers has failed so far")
        return
    click.echo(explained.to_json() if as_json else explained.text)


@click.command()
@click.argument("job")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), help="Archive to write.  [default: JOB-bundle.tar.gz]"
)
@click.option("--dry-run", is_flag=True, help="Only list what the archive would hold.")
def bundle(job: str, output: str | None, dry_run: bool) -> None:
    """Pack what helps to explain a job.

    One archive holds the logs, events, report, versions and the doctor's findings of JOB, which is a
    running job, a log folder, or the id of a job that is over where its folder is ./log. Of environment
    variables it holds the names, never the values.
    """
    from davincirunsdk.ctl.bundle import items_of, write_bundle
    from davincirunsdk.output.run_record import read_record

    events = events_of(job)
    name = read_record(events).job
    items = items_of(events, os.environ)
    for item in items:
        click.echo(f"{item.size:>12}  {plain(item.name)}")
    if dry_run:
        return
    target = Path(output or f"{name}-bundle.tar.gz").absolute()
    try:
        write_bundle(target, items)
    except OSError as error:
        fail(f"{target} cannot be written: {error.strerror}", FAULT)
    click.echo(f"{len(items)} files are in {plain(str(target))}")
