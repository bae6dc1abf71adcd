"""One file per published figure; the study is a package."""
