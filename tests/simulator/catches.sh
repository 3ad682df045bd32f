#!/bin/sh
# What a broken template does to the tests that run against the simulator: they fail, and say so.
#   catches.sh TEMPLATES SIMULATE GPU_TESTS
set -eu
templates=$1 simulate=$2 gpu_tests=$3
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failures=0

# caught FILE EDIT TEST WHAT...: with this edit the test fails, and its output has these words; with
# warps and lanes in the order of $seed.
seed=0
caught() {
  file=$1 edit=$2 test=$3 what=$4
  rm -rf "$folder/templates"
  cp -r "$templates" "$folder/templates"
  sed -i "$edit" "$folder/templates/$file"
  if cmp -s "$templates/$file" "$folder/templates/$file"; then
    echo "NOT BROKEN: $edit finds nothing in $file"
    failures=$((failures + 1))
    return
  fi
  SAGEBWD_TEMPLATE_DIR=$folder/templates SIMULATOR_SEED=$seed "$simulate" "$gpu_tests" \
    --gtest_filter="Gpu/$test" >"$folder/log" 2>&1 || true
  if grep -q "FAILED  .*$test" "$folder/log" && grep -q "$what" "$folder/log"; then
    echo "caught: $edit"
    return
  fi
  echo "NOT CAUGHT: $edit in $file"
  tail -n 20 "$folder/log"
  failures=$((failures + 1))
}

mma=Numerics.AnyLengths/Mma_D64_fp16_Row_TopLeft wgmma=Numerics.AnyLengths/D64_bf16_Row_TopLeft
fused=Numerics.AnyLengths/Fused_D64_bf16_BottomRight_4Warps
unsmoothed=SomeNumerics.ScoresFarBelowZero/Fused_D64_fp16_Unsmoothed
caught tile/math/products.cuh 's/cp_async_wait<0>();//' $mma 'numerics_test.cpp'
caught tile/math/products.cuh 's/__syncthreads();//' $mma 'numerics_test.cpp'
caught tile/math/products.cuh 's/__syncthreads();/if (lane_id() < 16) __syncthreads();/' $mma \
  'deadlock: warp 0: lanes 0 to 15 at __syncthreads in line'
caught tile/math/products_mma.cuh 's/&b\[2 \* half\]/\&b[2 - 2 * half]/' $mma 'numerics_test.cpp'
caught tile/math/softmax.cuh 's/(__any_sync(/(lane_id() < 16 \&\& __any_sync(/' $mma \
  'deadlock: warp 0: lanes 0 to 15 at vote.sync in line'
caught tile/math/products_wgmma.cuh 's/wgmma_wait<PENDING>();//' $wgmma 'numerics_test.cpp'
caught tile/math/products_wgmma.cuh 's/wgmma_fence();//' $wgmma 'wgmma without a fence'
caught tile/memory/wgmma_operands.cuh 's/{ fence_async_proxy(); }/{}/' $wgmma 'fence.proxy.async'
caught kernels/backward_dkv.cuh 's/ || (WITH_DQ && key\[r\] < SINK_KEYS)//' $unsmoothed \
  'numerics_test.cpp'
caught kernels/backward_dkv.cuh 's/(HIDES_SCORES || WITH_DQ || HAS_SCORE)/(HIDES_SCORES || HAS_SCORE)/' $unsmoothed 'numerics_test.cpp'
caught kernels/backward_dkv.cuh 's/__syncthreads(); .*/;/' $fused 'numerics_test.cpp'
caught tile/prepass/query_block.cuh 's/= {0, 0, 0, 0};/= {1, 0, 0, 0};/' \
  $fused 'numerics_test.cpp'
start=DpStart.IsOfMinusDeltaWhole/D64_fp16_Row
sums=DqSums.ReachTheirBound/Fp16Sums_D64_bf16 rows=DqSums.OfUnlikeTokens/Fp16Sums_D64_bf16
caught tile/dq/dq_factor.cuh 's/15 - above/18 - above/' $sums 'dq_sums_test.cpp'
caught tile/dq/dq_sums16.cuh 's/row % 2 ? low.y : low.x/low.x/' $rows 'dq_sums_test.cpp'
half=BitsOfHalfDp.AreTheEmulations/D64_fp16 bound=HalfDp.OfUnlikeTokens/HalfDp_D64_bf16
caught tile/math/products_mma.cuh 's/factor\[r\], addend/factor[0], addend/' \
  $half 'dp_sums_test.cpp'
caught tile/prepass/half_operands.cuh 's/VALUE_EXPONENT = 9/VALUE_EXPONENT = 20/' \
  $bound 'dp_sums_test.cpp'
caught tile/prepass/query_block.cuh 's/power.inverse \* factor/power.inverse/' \
  $bound 'dp_sums_test.cpp'
caught tile/math/column_start.cuh 's/pack<bf16>(high, middle)/pack<bf16>(high, 0)/' \
  $start 'dp_start_test.cpp'
caught tile/math/column_start.cuh 's/pack<bf16>(x - high - middle, 0)/0/' $start 'dp_start_test.cpp'
ring='QueryRing{shared + LAYOUT.barriers}'
caught kernels/backward_dkv_ws.cuh \
  "s/wait_for_phase(started(shared, state)/wait_for_phase($ring.full(state)/" \
  Sanitizer.ForwardAndBackwardGiveFiniteResults/D64_bf16_Row_TopLeft 'sanitizer_test.cpp'
seed=3
caught kernels/forward.cuh 's/__syncthreads(); .. the old scales.*//' \
  Numerics.NearExactAndEmulated/Wgmma_D64_fp16_Row 'numerics_test.cpp'
exit $failures
