"""The HTTP application: routes and error forms put together.

Knows what is served. Each route lives in a file of its own; what happens to a request before it
gets to a route is in `engine.server.middleware`.
"""

from fastapi import FastAPI

from engine.server import health
from engine.server.errors import add_error_handlers
from engine.server.state import ServerState
from engine.version import __version__


def make_app(state: ServerState) -> FastAPI:
    """The application of one server process."""
    shows_docs = state.config.enable_docs
    app = FastAPI(
        title="Isinglass",
        version=__version__,
        openapi_url="/openapi.json" if shows_docs else None,
        docs_url="/docs" if shows_docs else None,
        redoc_url=None,
    )
    app.state.server = state
    add_error_handlers(app)
    app.include_router(health.router)
    return app
