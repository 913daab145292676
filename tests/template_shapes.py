"""Chat templates by shape: what opens and closes a turn, what becomes of thoughts, tools and system messages.

`Shape` writes the Jinja text of one combination. `NAMED` are the shapes of public model families, written anew and
named by what they do.
"""

from dataclasses import dataclass
from typing import Literal

SPECIALS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|turn|>", "<|end_answer|>", "<|end_turn|>", "<|header|>",
    "<|/header|>", "<|eot|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "[INST]", "[/INST]", "<|start|>",
    "<|say|>", "<|call|>", "<|return|>", "<|end|>", "<|think|>", "<|/think|>", "<|tool_user|>", "<|tool_assistant|>",
]  # fmt: skip


def say(text: str) -> str:
    """Jinja that writes a text, with `{role}` for the message's role."""
    parts = [repr(part) for part in text.split("{role}")]
    return "{{- " + " + role + ".join(parts) + " }}" if text else ""


@dataclass(frozen=True)
class Shape:
    """One chat template.

    - `opener`, `closer`: around each turn; `answer_closer`: of assistant turns; `last_closer`: of the last message;
    - `thoughts`: ignored, kept, shown in the last message only, or in turns after the last question only;
    - `empty`: an empty thought is shown where a turn that may show one has none;
    - `prompt`: what the generation prompt adds to the opener; with `switch`, where thinking is on; `off`: where not;
    - `tools`: calls ignored, with results as turns of their own, as the user's, inside the assistant's turn, or with
      another opener for the answer that follows;
    - `naive`: the generation prompt opens a turn alike whatever stands before;
    - `marks`: generation marks around the answer, or around it with what closes it;
    - `system`: a turn, put before the first question, ignored, or refused.
    """

    opener: str = "<|im_start|>{role}\n"
    closer: str = "<|im_end|>\n"
    answer_closer: str | None = None
    last_closer: str | None = None
    call_closer: str | None = None
    thought: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    thoughts: Literal["ignored", "kept", "last", "after"] = "ignored"
    empty: bool = False
    prompt: str = ""
    switch: str | None = None
    off: str = ""
    tools: Literal["ignored", "turn", "user", "inside", "opener"] = "turn"
    marks: Literal["", "answer", "closed"] = ""
    system: Literal["turn", "folded", "ignored", "refused"] = "turn"
    bos: str = ""
    assistant: str = "assistant"
    trim: bool = False
    naive: bool = False

    @property
    def jinja(self) -> str:
        return (
            say(self.bos)
            + "{%- set ns = namespace(last=-1, system='', before='') %}"
            + "{%- for m in messages if m.role == 'user' %}{%- set ns.last = messages.index(m) %}{%- endfor %}"
            + "{%- for m in messages %}{%- set role = '" + self.assistant + "' if m.role == 'assistant' else m.role %}"
            + "{%- if m.role == 'system' %}" + self._system
            + "{%- elif m.role == 'user' %}" + say(self.opener)
            + "{{- ns.system + m.content }}{%- set ns.system = '' %}" + say(self.closer)
            + "{%- elif m.role == 'tool' %}" + self._result
            + "{%- else %}" + self._answer + "{%- endif %}{%- set ns.before = m.role %}{%- endfor %}"
            + "{%- if add_generation_prompt %}{%- set role = '" + self.assistant + "' %}"
            + (say(self.opener) if self.naive else self._open) + self._prompt
            + "{%- endif %}"
        )  # fmt: skip

    @property
    def _system(self) -> str:
        return {
            "turn": say(self.opener) + "{{- m.content }}" + say(self.closer),
            "folded": "{%- set ns.system = m.content + '\\n\\n' %}",
            "ignored": "",
            "refused": "{{- raise_exception('there is no system role') }}",
        }[self.system]

    @property
    def _result(self) -> str:
        return {
            "ignored": say(self.opener) + "{{- m.content }}" + say(self.closer),
            "turn": say(self.opener) + "{{- m.content }}" + say(self.closer),
            "user": "{%- set role = 'user' %}"
            + say(self.opener + "<result>") + "{{- m.content }}" + say("</result>" + self.closer),
            "inside": "{{- '<result>' + m.content + '</result>' }}",
            "opener": say("<|tool_user|>") + "{{- m.content }}",
        }[self.tools]  # fmt: skip

    @property
    def _open(self) -> str:
        if self.tools == "inside":
            return "{%- if ns.before != 'tool' %}" + say(self.opener) + "{%- endif %}"
        if self.tools == "opener":
            return (
                "{%- if ns.before == 'tool' %}{{- '<|tool_assistant|>' }}{%- else %}"
                + say(self.opener)
                + "{%- endif %}"
            )
        return say(self.opener)

    @property
    def _prompt(self) -> str:
        if self.switch is None:
            return say(self.prompt)
        on = f"{self.switch} is not defined or {self.switch}"
        return "{%- if " + on + " %}" + say(self.prompt) + "{%- else %}" + say(self.off) + "{%- endif %}"

    @property
    def _answer(self) -> str:
        content = "m.content | trim" if self.trim else "m.content"
        closer = say(self.closer if self.answer_closer is None else self.answer_closer)
        if self.call_closer is not None:
            closer = "{%- if m.tool_calls %}" + say(self.call_closer) + "{%- else %}" + closer + "{%- endif %}"
        if self.last_closer is not None:
            closer = "{%- if loop.last %}" + say(self.last_closer) + "{%- else %}" + closer + "{%- endif %}"
        if self.tools == "inside":  # the turn goes on after a call
            closer = "{%- if not m.tool_calls %}" + closer + "{%- endif %}"
        mark, end = "{%- generation %}", "{%- endgeneration %}"
        body = self._thought + "{{- " + content + " }}" + self._calls
        if self.marks == "answer":
            return self._open + mark + body + end + closer
        if self.marks == "closed":
            return self._open + mark + body + closer + end
        return self._open + body + closer

    @property
    def _thought(self) -> str:
        if self.thoughts == "ignored":
            return ""
        when = {"kept": "true", "last": "loop.last", "after": "loop.index0 > ns.last"}[self.thoughts]
        start, end = self.thought
        shown = say(start) + "{{- m.reasoning_content }}" + say(end)
        none = say(start) + say(end) if self.empty else ""
        return (
            "{%- if "
            + when
            + " %}{%- if m.reasoning_content %}"
            + shown
            + "{%- else %}"
            + none
            + "{%- endif %}{%- endif %}"
        )

    @property
    def _calls(self) -> str:
        if self.tools == "ignored":
            return ""
        return (
            "{%- for c in m.tool_calls or [] %}{{- '<call>' + c.function.name + ' ' + c.function.arguments | tojson "
            "+ '</call>' }}{%- endfor %}"
        )


HEADER = "<|header|>{role}<|/header|>\n\n"
EMPTY = "<think>\n\n</think>\n\n"

NAMED: dict[str, Shape] = {
    "turns between two marks": Shape(),
    "header, blank line, end of turn, BOS": Shape(HEADER, "<|eot|>", bos="<s>", trim=True),
    "model instead of assistant, no system role": Shape(
        "<|turn|>{role}\n", "<|end_turn|>\n", bos="<s>", assistant="model", system="refused", trim=True
    ),
    "system folded into the first question": Shape(
        "<|turn|>{role}\n", "<|end_turn|>\n", assistant="model", system="folded"
    ),
    "role as one token, nothing closes a question": Shape("<|{role}|>", "", answer_closer="</s>", tools="ignored"),
    "role as one token, each turn closed": Shape("<|{role}|>\n", "<|end|>\n"),
    "end of sequence only at the very end": Shape(last_closer="<|im_end|>\n</s>"),
    "another closer for the last turn": Shape("<|start|>{role}<|say|>", "<|end|>", last_closer="<|return|>"),
    "calls closed by a token of their own": Shape(
        "<|start|>{role}<|say|>", "<|end|>", last_closer="<|return|>", call_closer="<|call|>"
    ),
    "two specials close an answer": Shape(
        "<|turn|>{role}\n", "<|end_turn|>", answer_closer="<|end_answer|><|end_turn|>"
    ),
    "two specials on lines of their own": Shape(
        "<|turn|>{role}\n", "<|end_turn|>\n", answer_closer="<|end_answer|>\n<|end_turn|>\n"
    ),
    "thoughts kept everywhere": Shape(thoughts="kept"),
    "thoughts in the last message only": Shape(thoughts="last"),
    "thoughts after the last question": Shape(thoughts="after"),
    "thoughts after the last question, an empty one for none": Shape(thoughts="after", empty=True),
    "an empty thought everywhere": Shape(thoughts="kept", empty=True),
    "the prompt opens a thought that turns show": Shape(thoughts="after", empty=True, prompt="<think>\n"),
    "the prompt opens a thought that turns lack": Shape(prompt="<think>\n"),
    "the prompt has an empty thought that turns lack": Shape(prompt=EMPTY),
    "the prompt opens a thought, a switch closes it": Shape(
        thoughts="after", prompt="<think>\n", switch="enable_thinking", off=EMPTY
    ),
    "a switch empties the prompt's thought": Shape(thoughts="after", empty=True, switch="enable_thinking", off=EMPTY),
    "a switch by another name": Shape(
        "<|{role}|>", "</s>", thoughts="kept", prompt="<think>\n", switch="thinking", off="</think>"
    ),
    "results of tools as the user's": Shape(tools="user"),
    "results of tools inside the answer": Shape(tools="inside"),
    "results of tools inside the answer, the prompt opens another": Shape(tools="inside", naive=True),
    "another opener after a tool": Shape("<|{role}|>", "</s>", tools="opener"),
    "another opener after a tool, not in the prompt": Shape("<|{role}|>", "</s>", tools="opener", naive=True),
    "calls ignored": Shape(tools="ignored"),
    "marks around the answer": Shape(marks="answer"),
    "marks around the answer and its end": Shape(marks="closed"),
    "marks, thoughts after the last question": Shape(marks="closed", thoughts="after"),
    "no special token at all": Shape("{role}: ", "\n", tools="user"),
    "system ignored": Shape(system="ignored"),
    "special thoughts, in the last message only": Shape(
        "<|start|>{role}", "<|end|>", thought=("<|think|>", "<|/think|>"), thoughts="last", last_closer="<|return|>"
    ),
}
