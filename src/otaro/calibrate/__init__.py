"""Packing that compensates errors: codes chosen on real activations, for all precisions at once.

codes.py    one matrix: codes that make up for each other's error, and the error that is left
folds.py    input-channel scales, moved into what makes the inputs: a norm, or the rows of another matrix
layers.py   a model run layer by layer from disk, and the inputs of every packed matrix
text.py     windows of tokens of a text
work.py     the folder where finished layers wait
run.py      all of it: `pack_calibrated`
"""
