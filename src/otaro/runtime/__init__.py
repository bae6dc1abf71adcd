"""Running a nested model: packed modules, switching their precision, and the transformers plug-in."""
