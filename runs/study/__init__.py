"""The study: the paper's claims tested on real models, as rows that anyone can make again.

A *bench* is a model, a text and the sizes of a run (`plan.py`). A *row* is one way to tune that model,
measured at all precisions; its identity is its settings, and a row that the results file already holds is not
run again. Workers (`work.py`) take rows one after another, several of them side by side on one GPU, and keep
compiled steps between rows. `results.py` is the file they are kept in, `report.py` makes tables of it,
`figures.py` a figure. Nothing in here decides by the test text: learning rates and recipes are chosen on the
last tenth of the tuning text, which no row is tuned on.
"""
