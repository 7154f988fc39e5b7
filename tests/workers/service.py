"""A web service that runs training jobs: start, status, output as it comes, stop."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from davincirunsdk import DavinciRunError, FMKManager

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

jobs: list[FMKManager] = []


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Stop what still runs when the service ends: all at once, then wait for each."""
    async with AsyncExitStack() as app.state.running:
        yield
        for manager in jobs:
            manager.stop()


async def start(request: Request) -> Response:
    """Start a job; the answer comes when all workers run."""
    order = await request.json()
    manager = FMKManager(order["command"], nproc_per_node=order["workers"], grace_period=order["grace"])
    try:
        await request.app.state.running.enter_async_context(manager)
    except DavinciRunError as error:
        return JSONResponse({"error": str(error)}, 422)
    jobs.append(manager)
    return JSONResponse({"job": len(jobs) - 1}, 201)


async def status(request: Request) -> Response:
    """Tell where a job stands."""
    manager = jobs[request.path_params["job"]]
    workers = [{"rank": worker.rank, "exit_code": worker.exit_code} for worker in manager.workers]
    return JSONResponse({"state": manager.state, "workers": workers, "report": str(manager.error or "")})


async def log(request: Request) -> Response:
    """Stream a job's lines until it ends."""
    lines = jobs[request.path_params["job"]].logs()
    return StreamingResponse(f"[rank {line.rank}] {line.text}\n" async for line in lines)


async def stop(request: Request) -> Response:
    """Stop a job; the answer comes when nothing of it is left."""
    await jobs[request.path_params["job"]].stop()
    return Response(status_code=204)


routes = [
    Route("/jobs", start, methods=["POST"]),
    Route("/jobs/{job:int}", status),
    Route("/jobs/{job:int}/log", log),
    Route("/jobs/{job:int}", stop, methods=["DELETE"]),
]
app = Starlette(routes=routes, lifespan=lifespan)

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), loop=sys.argv[2], timeout_graceful_shutdown=1)
