"""Writing SVG: shapes and text, one element a line.

Knows markup and escaping. Does not know what is drawn. Equal calls give equal text.
"""

from html import escape

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_NARROW, _WIDE = frozenset("fijlrt.,:;|()[]/ '"), frozenset("mwMW")
_BOLD = 1.13


def text_width(text: str, size: float, *, weight: int = 400) -> float:
    """Estimate how wide a text is in one of the wider system fonts."""
    shares = (0.4 if one in _NARROW else 0.95 if one in _WIDE else 0.63 for one in text)
    return sum(shares) * size * (_BOLD if weight > 400 else 1)


class Svg:
    """A drawing that grows downwards; coordinates are pixels from the top left."""

    def __init__(self, *, width: int, title: str, description: str) -> None:
        self._width = width
        self._title, self._description = title, description
        self._lines: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        kind: str = "",
        tip: str = "",
        radius: float = 0,
    ) -> None:
        """Draw a filled rectangle; the tip shows under the pointer."""
        attributes = _attributes(
            class_=kind, x=x, y=y, width=width, height=height, rx=radius or None, fill=fill
        )
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self._lines.append(f"<rect {attributes}>{title}</rect>" if tip else f"<rect {attributes}/>")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 11,
        fill: str = "#2b303b",
        anchor: str = "start",
        weight: int = 400,
    ) -> None:
        """Write a line of text with its baseline at y."""
        attributes = _attributes(
            x=x,
            y=y,
            font_size=size,
            fill=fill,
            text_anchor=anchor if anchor != "start" else None,
            font_weight=weight if weight != 400 else None,
        )
        self._lines.append(f"<text {attributes}>{escape(text)}</text>")

    def path(
        self,
        points: list[tuple[float, float]],
        *,
        fill: str = "none",
        stroke: str = "none",
        width: float = 1,
        kind: str = "",
    ) -> None:
        """Draw straight lines from point to point, or fill what they enclose."""
        d = " ".join(
            f"{'L' if number else 'M'}{_number(x)} {_number(y)}"
            for number, (x, y) in enumerate(points)
        )
        attributes = _attributes(
            class_=kind,
            d=d,
            fill=fill,
            stroke=stroke if stroke != "none" else None,
            stroke_width=width if stroke != "none" else None,
        )
        self._lines.append(f"<path {attributes}/>")

    def render(self, height: float) -> str:
        """The whole document, cut at this height, on a white ground with a thin border."""
        size = _attributes(width=self._width, height=height)
        border = _attributes(
            x=0.5, y=0.5, width=self._width - 1, height=height - 1, rx=8, fill="#ffffff"
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
                f'viewBox="0 0 {self._width} {_number(height)}" font-family="{FONT}">',
                f"<title>{escape(self._title)}</title>",
                f"<desc>{escape(self._description)}</desc>",
                f'<rect {border} stroke="#d5d9e0"/>',
                *self._lines,
                "</svg>\n",
            ]
        )


def _attributes(**values: float | str | None) -> str:
    return " ".join(
        f'{name.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for name, value in values.items()
        if value is not None and value != ""
    )


def _value(value: float | str) -> str:
    return escape(value) if isinstance(value, str) else _number(value)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
