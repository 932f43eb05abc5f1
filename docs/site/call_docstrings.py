"""A griffe extension: the docstrings of `__call__`, whose shared parts are filled in when a pipeline is imported."""

import importlib
import re
import textwrap

import griffe


class CallDocstrings(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **kwargs) -> None:
        if func.name == "__call__" and func.module.path.startswith("arimage.pipelines.pipeline_"):
            owner = getattr(importlib.import_module(func.module.path), func.parent.name)
            # The example is indented less than the rest.
            sections = re.split(r"^(?= *(?:Examples|Returns):)", owner.__call__.__doc__, flags=re.MULTILINE)
            func.docstring.value = "\n\n".join(textwrap.dedent(section).strip() for section in sections)
