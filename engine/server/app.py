"""The HTTP application: routes and error forms put together.

Knows what is served. Each route lives in a file of its own; what happens to a request before it
gets to a route is in `engine.server.http.middleware`.
"""

import functools

from fastapi import FastAPI

from engine.server.admin import api_page, control, debug, health, load
from engine.server.admin.metrics import add_metrics
from engine.server.http.errors import add_error_handlers
from engine.server.http.methods import add_methods
from engine.server.http.middleware import add_guards
from engine.server.http.observe import observe
from engine.server.http.route_names import RouteNames
from engine.server.live import routes as live
from engine.server.live.files import PUBLIC_PATHS
from engine.server.openai import chat, completions, models, tokenization
from engine.server.openai.protocol.common import ErrorResponse
from engine.server.state import ServerState
from engine.version import __version__


def make_app(state: ServerState) -> FastAPI:
    """The application of one server process."""
    shows_docs = state.config.enable_docs
    app = FastAPI(
        title="Isinglass",
        version=__version__,
        openapi_url="/openapi.json" if shows_docs else None,
        docs_url=None,  # it would have browsers fetch scripts from elsewhere; see `api_page`
        redoc_url=None,
        # And no 422, which is never sent.
        responses={"default": {"model": ErrorResponse, "description": "An error, in this form."}},
    )
    app.state.server = state
    add_error_handlers(app)
    names = functools.cache(lambda: RouteNames(app.routes))  # when all are there
    state.route_names = names
    state.observation = observe(app, state, names)
    add_methods(app, names)
    add_guards(app, state, pages=PUBLIC_PATHS)  # what is added last is passed first
    if shows_docs:
        app.include_router(api_page.make_router(app))
    for routes in (health, load, models, completions, chat, tokenization):
        app.include_router(routes.router)
    if state.peers is not None:
        load.answer_peers(state.peers, state)
    add_metrics(app, state)
    if state.config.enable_debug_routes:
        app.include_router(control.router)
        app.include_router(debug.router)
        if state.peers is not None:
            debug.answer_peers(state.peers, state, state.observation)
            state.recording.answer_peers()
    else:
        state.routes_off = RouteNames([*control.router.routes, *debug.router.routes])
    if state.config.enable_live_page:
        app.include_router(live.make_router(state))
    return app
