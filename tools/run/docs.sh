# ./run docs [--serve]: the site of docs/, in build/site, by mkdocs in a Python of its own.

docs_python=$root/build/docs/bin/python

# Makes the Python that builds the site; fails if pip cannot install its packages.
prepare_docs() {
  local wanted=docs/_site/requirements.txt
  cmp -s $wanted build/docs/.requirements && return
  rm -rf build/docs
  "$python" -m venv build/docs &&
    "$docs_python" -m pip install --disable-pip-version-check --retries 2 --no-compile -r $wanted &&
    cp $wanted build/docs/.requirements
}

# mkdocs_of_docs COMMAND...: runs mkdocs, without advertisements in its output.
mkdocs_of_docs() {
  NO_MKDOCS_2_WARNING=1 "$docs_python" -m mkdocs "$@" --strict
}

run_docs() {
  [[ $# -eq 0 || $* == --serve ]] || wrong_use "docs takes --serve, not '$*'"
  prepare sagebwd _core
  step pip-docs "Installing what builds the site" prepare_docs
  if [[ $* == --serve ]]; then
    mkdocs_of_docs serve
  else
    step docs "Building the site" mkdocs_of_docs build
    echo "build/site/index.html"
  fi
}
