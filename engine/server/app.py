"""The HTTP application: routes and error forms put together.

Knows what is served. Each route lives in a file of its own; what happens to a request before it
gets to a route is in `engine.server.middleware`.
"""

from fastapi import FastAPI

from engine.server import chat, completions, control, debug, health, models, tokenization
from engine.server.chat_templates import ChatTemplates
from engine.server.errors import add_error_handlers
from engine.server.live import routes as live
from engine.server.metrics import add_metrics
from engine.server.middleware import add_guards
from engine.server.observe import observe
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
    app.state.chat_templates = ChatTemplates(state.config)
    add_error_handlers(app)
    observe(app, state)
    add_guards(app, state)  # what is added last is passed first
    for routes in (health, models, completions, chat, tokenization):
        app.include_router(routes.router)
    add_metrics(app, state)
    if state.config.enable_debug_routes:
        app.include_router(control.router)
        app.include_router(debug.router)
    if state.config.enable_live_page:
        app.include_router(live.make_router(state))
    return app
