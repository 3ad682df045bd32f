# The demo, which ./run sources after everything is built. It uses $python.
sagebwd=build/bin/sagebwd
archs=sm_80,sm_86,sm_89,sm_90a,sm_120

title() { printf '\n%s\n' "$1"; }

# Builds one operation after the other, so that each is seen when it is done.
build_all() {
  local arch
  for arch in ${archs//,/ }; do
    $sagebwd build --arch $arch --head-dim 128 --dtype bf16
  done
}

attention_kernels() {
  local words row='%-48s %-7s %-8s %6s %9s %6s %6s  %s\n' kernels=0 cached=0 ms=0
  printf "$row" kernel arch pass ms registers spills shared cached
  while read -r -a words; do
    case ${words[*]} in
      sagebwd_forward_* | sagebwd_backward_*) printf "$row" "${words[@]}" ;;
      *" kernels, "*" from the cache, "*" ms in all")
        kernels=$((kernels + words[0])) cached=$((cached + words[2])) ms=$((ms + words[6]))
        ;;
    esac
  done
  echo "$kernels kernels, $cached from the cache, $ms ms in all"
}

title "1. Forward and backward, D 128, bf16, compiled for five architectures"
echo "The table has the attention kernels of each operation: a forward, and a backward of one or two"
echo "kernels. The number below it is that of all kernels."
build_all | attention_kernels

title "2. The same in a second process: from the cache in $SAGEBWD_CACHE_DIR"
$sagebwd build --arch $archs --head-dim 128 --dtype bf16 | tail -n 1

title "3. A pack, and a machine that may not compile: no NVRTC, an empty cache"
pack=build/logs/demo.pack
$sagebwd prebuild --arch sm_90a --head-dim 128 --dtype bf16 --out $pack | tail -n 1
offline() {
  SAGEBWD_OFFLINE=1 SAGEBWD_CACHE_PACKS=$pack SAGEBWD_CACHE_DIR=$root/build/logs/empty-cache \
    SAGEBWD_NVRTC=/nowhere $sagebwd build --arch sm_90a "$@"
}
offline --head-dim 128 | tail -n 1
echo "A kernel that it lacks is an error, which says how to build it:"
offline --head-dim 64 2>&1 | fold -s -w 100 || true

title "4. Error against FP64, cosine / relative L2 (emulated on the CPU, bit for bit)"
shape="--head-dim 128 --seq-len 1024 --heads 4 --sigma 1"
$sagebwd trace --device cpu $shape --granularity row >build/logs/trace-row.txt
$sagebwd trace --device cpu $shape --granularity block >build/logs/trace-block.txt
awk '
  BEGIN {
    # arXiv 2603.02170. Table 1: random inputs, sigma 1. Table 2: a layer of a trained model.
    split("delta P dP dS O dQ dK dV", order)
    table1["O"] = ".9999 / .0160"; table1["dQ"] = ".9998 / .0184"
    table1["dK"] = ".9998 / .0220"; table1["dV"] = ".9999 / .0159"
    table2["delta"] = ".9973 / .0736"; table2["P"] = ".9917 / .1293"; table2["dP"] = "1 / 0"
    table2["dS"] = ".9789 / .2045"; table2["O"] = ".9969 / .0793"; table2["dQ"] = ".9664 / .2579"
    table2["dK"] = ".9537 / .3074"; table2["dV"] = ".9985 / .0540"
    form = "%-8s%-18s%-18s%-18s%s\n"
    printf form, "tensor", "row (default)", "block", "paper, Table 1", "paper, Table 2"
  }
  $2 ~ /^[0-9.]+$/ && NF == 3 { ours[FILENAME, $1] = sprintf("%.4f / %.4f", $2, $3) }
  END {
    for (i = 1; i <= 8; ++i) {
      t = order[i]
      printf form, t, ours["build/logs/trace-row.txt", t], ours["build/logs/trace-block.txt", t],
             (t in table1) ? table1[t] : "-", table2[t]
    }
  }' build/logs/trace-row.txt build/logs/trace-block.txt
echo "Ours and Table 1: q, k, v, dO ~ N(0, 1). Ours: D 128, N 1024 (the paper states no shape)."
echo "Table 2: inputs of a trained model, which are harder. 'sagebwd trace' and the Python package"
echo "trace your inputs."

if $sagebwd doctor | grep -q '^gpu 0'; then
  title "5. On this GPU, random problems against FP64"
  $sagebwd verify --cases 20
  title "6. Forward and backward from C++"
  build/bin/attention_example
  title "7. Tuned for this GPU"
  $sagebwd tune --head-dim 128 --seq-len 2048 --batch 4 --heads 16
  if "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    title "8. Beside PyTorch's attention"
    "$python" -m sagebwd bench --rounds 5
  fi
else
  title "5. No GPU here: kernels were compiled, not run"
  $sagebwd doctor | grep '^driver' || true
fi
title "Next: build/bin/sagebwd --help, ./run test, README.md"
