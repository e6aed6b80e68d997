"""Reasoning between tags at the beginning of an answer: `<think>…</think>` and its like.

Knows where reasoning begins and ends. Tags anywhere else in an answer are its content.
"""

from dataclasses import dataclass

from engine.server.openai.reasoning.tag_search import first_tag, num_held_back


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """How a family marks reasoning.

    Attributes:
        starts: any of them opens it; what they have in common must not be one of them.
        ends: any of them closes it.
        begins_open: answers begin within the reasoning unless the prompt has closed it.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    begins_open: bool = False

    def opens_in(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within the reasoning."""
        end = prompt.rstrip()
        if end.endswith(self.starts):
            return True
        return self.begins_open and not end.endswith(self.ends)

    def is_closed_in(self, prompt: str) -> bool:
        """Whether the prompt ends with reasoning that is closed: an answer will have none."""
        return prompt.rstrip().endswith(self.ends)


class ReasoningParser:
    """Parts the text of one answer into reasoning and the rest.

    White space around the reasoning is dropped. An answer that ends within it has no content; one
    that does not begin with a tag is all content, its white space included.

    Args:
        is_open: the answer begins within the reasoning.
    """

    __slots__ = ("_ends", "_is_done", "_is_open", "_rest", "_starts", "_starts_text")

    def __init__(self, syntax: ReasoningSyntax, *, is_open: bool = False) -> None:
        self._starts = syntax.starts
        self._ends = syntax.ends
        self._is_open = is_open
        self._is_done = False
        """Whether the reasoning is over, or never began: everything else is content."""
        self._starts_text = True
        """Whether nothing but white space has come since the last tag."""
        self._rest = ""

    def feed(self, text: str) -> tuple[str, str]:
        """More reasoning and more content, either often empty."""
        if self._is_done and not self._starts_text:
            return "", text
        self._rest += text
        if not self._is_done and not self._find_start():
            return "", self._content() if self._is_done else ""
        thought = "" if self._is_done else self._thought()
        return thought, self._content() if self._is_done else ""

    def finish(self) -> tuple[str, str]:
        """What is left when the text has ended."""
        rest, self._rest = self._rest, ""
        if self._is_done:
            return "", ""
        if self._is_open:
            return rest.strip() if self._starts_text else rest.rstrip(), ""
        return "", rest

    def _find_start(self) -> bool:
        """Whether the reasoning has begun; if it cannot begin any more, it is done."""
        shown = self._rest.lstrip()
        for start in self._starts:
            # Also where it is open already: some models repeat the tag that the prompt ends with.
            if self._starts_text and shown.startswith(start):
                self._rest = shown[len(start) :]
                self._is_open = True
                self._starts_text = True
                self._starts = ()
                return True
        if self._starts_text and any(start.startswith(shown) for start in self._starts):
            return False
        if not self._is_open:
            self._is_done = True
            self._starts_text = False
        self._starts = ()
        return self._is_open

    def _thought(self) -> str:
        """Reasoning that is settled; a closing tag, or the space before it, may be coming."""
        if self._starts_text:
            self._rest = self._rest.lstrip()
        found = first_tag(self._rest, self._ends)
        if found is not None:
            place, tag = found
            thought = self._rest[:place].rstrip()
            self._rest = self._rest[place + len(tag) :]
            self._is_done = True
            self._starts_text = True
            return thought
        kept = len(self._rest) - num_held_back(self._rest, self._ends)
        thought = self._rest[:kept].rstrip()
        self._rest = self._rest[len(thought) :]
        self._starts_text = self._starts_text and not thought
        return thought

    def _content(self) -> str:
        """Content; white space right behind the reasoning is dropped."""
        text, self._rest = self._rest, ""
        if self._starts_text:
            text = text.lstrip()
            self._starts_text = not text
        return text
