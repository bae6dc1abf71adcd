"""A nested model in a page: `otaro web DIR OUT` writes a folder that any static host serves.

`site.py` puts it together: `page/` (plain files, without a build), the decoder as WebAssembly, which
`build.py` compiles from the same sources as everywhere, two libraries for text, which `libraries.py` has from
npm, and the model. `server.py` serves such a folder from this machine. docs/web.md is for users.
"""
