"""`/metrics`: everything that is counted, as Prometheus text or OpenMetrics."""

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from engine.server.cluster.metrics_page import MetricsPage
from engine.server.state import ServerState, server_of
from instrumentation import SinkName

router = APIRouter()


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Every metric of the catalogue, for Prometheus."""
    page = server_of(request).metrics_page
    headers = request.headers
    return await page.render(headers.get("accept", ""), headers.get("accept-encoding", ""))


def add_metrics(app: FastAPI, state: ServerState) -> None:
    """Serve `/metrics`; `state.metrics_page` is where its snapshots come from."""
    page = MetricsPage(state.engine, state.observation)
    state.metrics_page = page
    state.engine.metric_exporters.append((SinkName.PROMETHEUS, page))
    app.include_router(router)
