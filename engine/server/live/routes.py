"""The live view over HTTP: the page at `/`, its files, and the stream at `/live/events`.

Knows how a reader of the stream comes, goes and stalls. Does not know what it is told.
"""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from engine.log import get_logger
from engine.server.http.route_names import FILES_ROUTE, ICON_PATH, route_path
from engine.server.live.feed import LiveFeed
from engine.server.live.files import HEADERS, page_files
from engine.server.live.watcher import Watcher
from engine.server.state import ServerState

logger = get_logger(__name__)

STALL_S = 20.0
"""A reader that takes nothing for so long is dropped."""


class LiveStream(Response):
    """Server-sent events to one watcher, until either side ends it."""

    def __init__(self, feed: LiveFeed, watcher: Watcher) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers=HEADERS | {"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._feed, self._watcher = feed, watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.create_task(self._wait_for_leaving(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while frames := await self._feed.next_frames(self._watcher):
                async with asyncio.timeout(STALL_S):
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            logger.info("a live view that took nothing for %g s was dropped", STALL_S)
        finally:
            leaving.cancel()
            self._feed.leave(self._watcher)

    async def _wait_for_leaving(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._watcher.close()


def make_router(state: ServerState) -> APIRouter:
    """The routes of one server's live view."""
    router = APIRouter(include_in_schema=False)
    feed = LiveFeed(state)
    if state.peers is not None:
        state.peers.tellers["live"] = feed.tell_other

    files = page_files()

    @router.get("/live/events")
    async def events(request: Request) -> LiveStream:
        """The stream of snapshot and deltas; see `engine.server.live.feed`."""
        return LiveStream(feed, feed.join())

    async def serve_file(request: Request) -> Response:
        file = files.get(route_path(request.scope))
        if file is None:
            raise HTTPException(404)
        return Response(file.content, media_type=file.media_type, headers=HEADERS)

    for path in ("/", ICON_PATH, FILES_ROUTE):  # the stream is in front of them
        router.add_api_route(path, serve_file, methods=["GET", "HEAD"])
    return router
