"""A griffe extension: `__call__` as help() shows it. Shared parts of its docstring are filled in, and its shared
arguments listed, when a pipeline is imported."""

import importlib
import inspect
import re
import textwrap

import griffe


class CallDocstrings(griffe.Extension):
    def __init__(self):
        self.shared = griffe.load("arimage.pipelines.arguments", search_paths=["."], resolve_aliases=False)

    def on_function(self, *, func: griffe.Function, **kwargs) -> None:
        if not any("pipeline_call" in str(decorator.value) for decorator in func.decorators):
            return
        call = getattr(importlib.import_module(func.module.path), func.parent.name).__call__
        # The example is indented less than the rest.
        sections = re.split(r"^(?= *(?:Examples|Returns):)", call.__doc__, flags=re.MULTILINE)
        func.docstring.value = "\n\n".join(textwrap.dedent(section).strip() for section in sections)

        *own, common = func.parameters
        annotations = {}
        kind = self.shared[re.search(r"\w+Arguments", str(common.annotation))[0]]
        for base in (*kind.mro(), kind):
            annotations |= {name: field.annotation for name, field in base.attributes.items()}
        func.parameters = griffe.Parameters(*own)
        signature = inspect.signature(call)
        for parameter in list(signature.parameters.values())[len(own) :]:
            func.parameters.add(
                griffe.Parameter(
                    parameter.name,
                    annotation=annotations[parameter.name],
                    kind=griffe.ParameterKind.keyword_only,
                    default=repr(parameter.default),
                )
            )
        output = signature.return_annotation.__args__[0].__name__
        func.returns = f"{output} | tuple"
