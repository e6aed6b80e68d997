"""Output in a given form: a JSON schema, a regular expression, a choice, a grammar."""

import json

from engine import LLM, SamplingParams, StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
FORMS = {
    "Describe a person as JSON.": StructuredOutputsParams(json=PERSON),
    "What is Ann's mail address?": StructuredOutputsParams(
        regex=r"[a-z]{2,8}@[a-z]{3,9}\.(com|org)"
    ),
    "Is the sky blue? Yes or no?": StructuredOutputsParams(choice=["yes", "no"]),
    "What is one plus two?": StructuredOutputsParams(
        grammar='root ::= number " + " number " = " number\nnumber ::= [0-9]{1,3}'
    ),
    "This is a mistake.": StructuredOutputsParams(grammar="root ::= missing"),
}

with LLM(log_level="warning") as llm:
    outputs = llm.chat(
        [[{"role": "user", "content": question}] for question in FORMS],
        [
            SamplingParams(temperature=0, max_tokens=80, structured_outputs=form)
            for form in FORMS.values()
        ],
        use_tqdm=False,
    )

for question, output in zip(FORMS, outputs, strict=True):
    print(f"{question:28} {output.outputs[0].text or output.error}")
print("parsed:", json.loads(outputs[0].outputs[0].text))
