# `make serve` and `make test` each set up all they need; the second time they start at once.
# PYTHON=/path/to/python chooses the interpreter, CONFIG=file another Serve configuration.
.PHONY: serve test
INSTALLED := .venv/.installed
export PYTHON

serve: $(INSTALLED)
	.venv/bin/python -m deployments.demo_model
	.venv/bin/python scripts/serve.py $(CONFIG)

test: $(INSTALLED)
	scripts/check

$(INSTALLED): pyproject.toml constraints.txt scripts/setup
	scripts/setup
	touch $@
