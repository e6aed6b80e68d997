"""Random JSON schemas of all keywords."""

import random
from typing import Any

NAMES = ("a", "b", "title", "default", "x y", "é", '"q"')


PATTERNS = (
    *("^[a-z]+$", "a?b", "^(?:ab+)?$", "^.{0,3}$", "^é\\S*$", "\\d{2,3}", "^(a|b)$", '^[^"]*$'),
    *("^x", "[\\s\\S]{1,4}"),
)


FORMATS = (
    *("email", "date", "time", "date-time", "ipv4", "ipv6", "uuid", "uri", "hostname", "duration"),
    "unknown",
)


VALUES = (
    *(1, 2.5, "a", 'é"/\\\n', None, True, [1, {"title": 2}], {"title": 1}, {"a": "b"}, -3),
    *(1e22, 0.1),
)


class Schemas:
    """Makes schemas of all keywords, many of which mean something together."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def root(self) -> dict[str, Any]:
        schema = self.schema()
        while not isinstance(schema, dict):
            schema = self.schema()
        return schema | {"$defs": {"A": self.schema(2), "B": self.schema(2)}}

    def schema(self, depth: int = 0) -> Any:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.03:
            return rng.choice([True, False, {}])
        if depth < 3 and kind < 0.10:
            options = [self.schema(depth + 1) for _ in range(rng.randint(1, 3))]
            beside = {"type": rng.choice(["string", "object"])} if rng.random() < 0.2 else {}
            return {rng.choice(["anyOf", "anyOf", "oneOf"]): options} | beside
        if kind < 0.15:
            return {"$ref": rng.choice(["#/$defs/A", "#/$defs/B", "#", "#/$defs/A/anyOf/0"])}
        if kind < 0.24:
            values = rng.sample(VALUES, rng.randint(1, 3))
            form = {"enum": values} if rng.random() < 0.7 else {"const": values[0]}
            return form | ({"type": rng.choice(["string", "number"])} if rng.random() < 0.3 else {})
        if kind < 0.28:
            return {"allOf": [self.schema(depth + 1) for _ in range(rng.randint(1, 2))]}
        if kind < 0.31:
            return {"$ref": rng.choice(["#/$defs/A", "#/$defs/B"])} | self.typed(depth)
        return self.typed(depth)

    def typed(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        names = ["string", "integer", "number", "boolean", "null", "array", "object", "object"]
        types = [rng.choice(names)]
        if rng.random() < 0.1:
            types = sorted({types[0], rng.choice(names)})
        schema: dict[str, Any] = {"type": types if len(types) > 1 else types[0]}
        if rng.random() < 0.08:
            del schema["type"]
        for name in types:
            if name in ("string", "array", "object"):
                getattr(self, f"add_{name}")(schema, depth)
            elif name in ("integer", "number"):
                self.add_number(schema)
        return schema

    def add(self, schema: dict[str, Any], share: float, keyword: str, make: Any) -> None:
        if self.rng.random() < share:
            schema[keyword] = make()

    def add_string(self, schema: dict[str, Any], depth: int) -> None:
        rng = self.rng
        self.add(schema, 0.3, "minLength", lambda: rng.randint(0, 3))
        self.add(schema, 0.3, "maxLength", lambda: rng.randint(1, 5))
        self.add(schema, 0.3, "pattern", lambda: rng.choice(PATTERNS))
        self.add(schema, 0.2, "format", lambda: rng.choice(FORMATS))

    def add_number(self, schema: dict[str, Any]) -> None:
        rng = self.rng
        lows, highs = [-20, 0, 1.5, 3, -0.25, 1e-7, 0.1234567], [100, 7, 3.5, 10**6, 12.3456789]
        self.add(schema, 0.4, "minimum", lambda: rng.choice(lows))
        self.add(schema, 0.4, "maximum", lambda: rng.choice(highs))
        self.add(schema, 0.15, "exclusiveMinimum", lambda: rng.choice([-5, 0, 2.5, 0.1]))
        self.add(schema, 0.15, "exclusiveMaximum", lambda: rng.choice([9, 50, 8.5, 0.3]))
        self.add(schema, 0.2, "multipleOf", lambda: rng.choice([1, 2, 7, 10, 0.5, 3.0]))

    def add_array(self, schema: dict[str, Any], depth: int) -> None:
        rng = self.rng
        few = [self.schema(depth + 1) for _ in range(rng.randint(1, 2))] if depth < 4 else [{}]
        self.add(schema, 0.6, "items", lambda: few[0])
        self.add(schema, 0.2, "prefixItems", lambda: few)
        self.add(schema, 0.4, "minItems", lambda: rng.randint(0, 2))
        self.add(schema, 0.4, "maxItems", lambda: rng.randint(1, 4))
        self.add(schema, 0.05, "minContains", lambda: 1)
        self.add(schema, 0.05, "contains", lambda: {"type": "integer"})
        self.add(schema, 0.05, "uniqueItems", lambda: rng.random() < 0.3)
        self.add(schema, 0.05, "unevaluatedItems", lambda: few[-1])

    def add_object(self, schema: dict[str, Any], depth: int) -> None:
        rng = self.rng

        def inner() -> Any:
            return self.schema(depth + 1) if depth < 4 else {}

        names = rng.sample(NAMES, rng.randint(1, 3))
        self.add(schema, 0.7, "properties", lambda: {name: inner() for name in names})
        self.add(schema, 0.4, "required", lambda: rng.sample(NAMES[:4], rng.randint(1, 2)))
        self.add(schema, 0.2, "additionalProperties", inner)
        self.add(schema, 0.2, "additionalProperties", lambda: rng.random() < 0.5)
        self.add(schema, 0.15, "patternProperties", lambda: {rng.choice(PATTERNS[:3]): inner()})
        keys = [{"enum": ["a", "b"]}, {"pattern": "^[a-c]+$"}, {}, {"type": "string"}]
        self.add(schema, 0.1, "propertyNames", lambda: rng.choice(keys))
        self.add(schema, 0.15, "minProperties", lambda: rng.randint(0, 2))
        self.add(schema, 0.15, "maxProperties", lambda: rng.randint(1, 4))
        self.add(schema, 0.05, "unevaluatedProperties", inner)
        self.add(schema, 0.06, "anyOf", lambda: [{"required": ["a"]}, {"required": ["b"]}])
