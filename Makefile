# `make serve` and `make test` each set up all they need; the second time they start at once.
.PHONY: serve test
INSTALLED := .venv/.installed
export PYTHON

serve: $(INSTALLED)
	.venv/bin/python scripts/serve $(CONFIG)

test: $(INSTALLED)
	scripts/check

$(INSTALLED): pyproject.toml constraints.txt scripts/setup
	scripts/setup
	touch $@
