# Stand-ins for libcuda.so.1 and libnvrtc that run kernels on the CPU (tests/simulator), and the GPU
# tests that run against them. Sanitizers know nothing of fibers.
if(CMAKE_CXX_FLAGS MATCHES "-fsanitize" OR NOT CMAKE_SYSTEM_NAME STREQUAL Linux)
  return()
endif()

set(simulator ${PROJECT_BINARY_DIR}/simulator)
set(sources ${PROJECT_SOURCE_DIR}/tests/simulator)
add_library(simulated_cuda SHARED tests/simulator/libcuda.cpp tests/simulator/block.cpp
            tests/simulator/fiber.cpp tests/simulator/barriers.cpp tests/simulator/bulk_copies.cpp
            tests/simulator/products.cpp)
add_library(simulated_nvrtc SHARED tests/simulator/libnvrtc.cpp)
target_compile_definitions(simulated_nvrtc PRIVATE SIMULATOR_COMPILER="${CMAKE_CXX_COMPILER}"
                           SIMULATOR_FOLDER="${PROJECT_SOURCE_DIR}/tests/simulator")
foreach(library cuda nvrtc)
  target_include_directories(simulated_${library} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(simulated_${library} PRIVATE ${warnings} -O3 -fno-strict-aliasing)
  target_link_libraries(simulated_${library} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
  set_target_properties(simulated_${library} PROPERTIES OUTPUT_NAME ${library}
                        LIBRARY_OUTPUT_DIRECTORY ${simulator})
endforeach()
set_target_properties(simulated_cuda PROPERTIES SUFFIX .so.1)
add_dependencies(gpu_tests simulated_cuda simulated_nvrtc)
# They go over every value of every copy, every weight of every query, and every term of every sum:
# without optimisation that takes as long as the kernels.
set_source_files_properties(tests/gpu/quantize_test.cpp tests/gpu/mixture_test.cpp
                            tests/gpu/linear_sums_test.cpp
                            PROPERTIES COMPILE_OPTIONS -O1 SKIP_PRECOMPILE_HEADERS ON)
configure_file(${PROJECT_SOURCE_DIR}/tests/simulator/simulate.in ${simulator}/simulate @ONLY)

# What the simulator itself can do.
add_executable(simulator_tests tests/simulator/simulator_test.cpp
               tests/simulator/lengths_test.cpp)
target_compile_definitions(simulator_tests PRIVATE SIMULATOR_FOLDER="${sources}")
target_link_libraries(simulator_tests PRIVATE sagebwd_runtime GTest::gtest GTest::gtest_main
                      ${CMAKE_DL_LIBS})
target_compile_options(simulator_tests PRIVATE -O0)
target_precompile_headers(simulator_tests REUSE_FROM tests_precompiled)
add_dependencies(simulator_tests simulated_cuda simulated_nvrtc)
add_test(NAME Simulated.Itself COMMAND ${simulator}/simulate $<TARGET_FILE:simulator_tests>)
set_tests_properties(Simulated.Itself PROPERTIES LABELS simulated TIMEOUT ${test_limit})

# simulated_test(NAME FILTERS [VARIABLE=VALUE...]): GPU tests by GoogleTest's filters. A test that
# is skipped, or a filter that finds none, is a failure here.
function(simulated_test name filters)
  list(JOIN filters ":" filters)
  add_test(NAME Simulated.${name}
           COMMAND ${simulator}/simulate $<TARGET_FILE:gpu_tests> --gtest_filter=${filters})
  set_tests_properties(Simulated.${name} PROPERTIES LABELS "simulated;heavy" COST 40
                       TIMEOUT ${test_limit} ENVIRONMENT "${ARGN}"
                       FAIL_REGULAR_EXPRESSION "SKIPPED;Running 0 tests;FAILED")
endfunction()

# simulated_cases(FILTERS SUITE NAME...): the filters of these cases.
function(simulated_cases filters suite)
  list(TRANSFORM ARGN PREPEND "${suite}/")
  set(${filters} "${ARGN}" PARENT_SCOPE)
endfunction()

simulated_test(Arguments "Arguments.*")
simulated_test(CDoor "CDoor*")
# dv16's copies are those of six_of_seven, except dO's, which are those of gradients16.
simulated_cases(copies Gpu/QuantizeAll.*
  D64_row_six_of_seven D64_row_qk16 D64_row_gradients16 D128_block_six_of_seven)
simulated_test(Copies "${copies}")
# Of 320 queries and 600 keys, where rings turn and units follow each other: of 64 channels every
# tile, precision and granularity of each family, but for those of which Lengths has the same
# kernels, with rings of two stages at most. With warps, lanes and asynchronous work in another
# order than in those without a seed.
simulated_cases(near_exact Gpu/Numerics.NearExactAndEmulated
  D64_bf16_Block D64_bf16_Row64 D64_fp16_Block_TopLeft D64_fp16_Qk16_TopLeft D64_fp16_Gradients16
  Mma_D64_bf16_Dv16 Ordered_D64_bf16_TopLeft
  FusedWs_D64_bf16 FusedWs_D64_bf16_Block_BottomRight
  Wgmma8Warps_D64_bf16_Row128 Wgmma_D64_fp16_Row SmoothQ_D64_bf16_Row_TopLeft
  SmoothQ_D64_bf16_Gradients16 Packed_D64_bf16_TopLeft HalfDp_D64_bf16)
simulated_test(Numerics "${near_exact}" SIMULATOR_SEED=4)
# Cases whose kernels have every value of every constant (lengths_test.cpp).
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${sources}/lengths.txt)
file(STRINGS ${sources}/lengths.txt lengths)
simulated_cases(lengths Gpu/Numerics.AnyLengths ${lengths})
foreach(shard RANGE 1) # half of them each, as they take longest
  simulated_test(Lengths_${shard} "${lengths}" SIMULATOR_SEED=1
                 GTEST_TOTAL_SHARDS=2 GTEST_SHARD_INDEX=${shard})
endforeach()
simulated_cases(blind_rows Gpu/BlindRows.*
  D128_fp16_Row_BottomRight SmoothQ_D128_bf16_Block_BottomRight Mma_D128_fp16_Qk16_BottomRight
  Fused_D64_bf16_BottomRight_4Warps FusedWs_D64_bf16_Block_BottomRight
  Fp16Sums_D128_bf16_BottomRight_NoSink HalfDp_D128_bf16_BottomRight_NoSink
  D256_bf16_Row_BottomRight_NoSink)
simulated_test(BlindRows "${blind_rows}" SIMULATOR_SEED=2)
simulated_test(GroupedQueries "Gpu/SomeNumerics.GroupedQueries/D128_bf16_Row")
# The pre-passes take the gradient of lse into rows: each family and copy, and the mean put back.
simulated_cases(through_lse Gpu/Numerics.GradientThroughLse
  D64_bf16_Row_TopLeft D64_bf16_Block Mma_D64_bf16_Dv16 Fused_D64_bf16 FusedWs_D64_bf16
  Wgmma8Warps_D64_bf16_Row128 SmoothQ_D64_bf16_Row_TopLeft Packed_D64_bf16_TopLeft)
simulated_test(GradientThroughLse "${through_lse}")
simulated_cases(key_mean Gpu/KeyMean.*
  D64_bf16_Row_TopLeft D64_bf16_Block D64_fp16_Qk16_TopLeft D64_fp16_Gradients16 D160_bf16_Row
  Mma_D64_bf16_Dv16 Fused_D64_bf16 Fp16Sums_D64_bf16)
simulated_test(KeyMean "${key_mean};OnGpu.PackedSequencesHaveKeyMeansOfTheirOwn")
# Memory that nobody has written reads as NaN here. Cases of other tests, most of Lengths and
# Numerics, whose kernels are compiled already.
simulated_cases(initialised Gpu/Sanitizer.ForwardAndBackwardGiveFiniteResults
  D64_fp16_Block_TopLeft D64_fp16_Gradients16 D72_fp16_Dv16_Unsmoothed D160_bf16_Row
  D256_fp16_Gradients16 Mma_D64_bf16_Dv16 Fused_D64_bf16 FusedWs_D64_bf16 Fp16Sums_D64_bf16
  Wgmma8Warps_D64_bf16_Row128 HalfDp_D64_bf16 HalfDp_Fused_D128_fp16 SmoothQ_D64_bf16_Row_TopLeft
  SmoothQ_D128_bf16_Block_BottomRight Turns_SmoothQ_D160_bf16 Window_D64_bf16
  Window_FusedWs_D128_bf16 Packed_D64_bf16_TopLeft Packed_D256_bf16_Window
  Packed_Mma_D128_bf16_TopLeft)
simulated_test(Initialised "${initialised}" SIMULATOR_SEED=3)
simulated_test(SmoothQ "Gpu/SmoothQ.*")
# Every option of lists near FP64 and the emulation, and with a gradient of lse. What else is asked
# of them: of one or two cases of each family, so that every option is in two of these at least.
simulated_cases(listed Gpu/Listed
  NearExactAndEmulated/D64_* GradientThroughLse/D64_*
  EveryBlock*/D64_bf16_128x128_BottomRight_Ws EveryBlock*/D64_bf16_64x128_Qk16
  OddLengths/D64_bf16_128x64_HalfDp OddLengths/D64_bf16_128x128_BottomRight_Ws
  OddLengths/D64_fp16_64x128_TopLeft OddLengths/D64_bf16_128x64_Block_TopLeft
  EmptyAnd*/D64_bf16_128x64_HalfDp EmptyAnd*/D64_bf16_128x128_BottomRight_Ws
  EmptyAnd*/D64_bf16_64x128_Qk16 PopularBlocks/D64_bf16_128x64
  PopularBlocks/D64_fp16_128x64_BottomRight_Mma PopularBlocks/D64_bf16_128x128_Groups64_TopLeft
  ListsThat*/D64_bf16_128x64 ListsThat*/D64_fp16_128x64_BottomRight_Mma)
list(TRANSFORM listed REPLACE "Listed/" "Listed.")
simulated_test(Lists "${listed};Gpu/LongLists.*;Gpu/PackedLists.*;OnGpu.ScalesCome*" SIMULATOR_SEED=4)
# Every number of numbers, every family and granularity, and what else is asked of one of them.
simulated_cases(with_intervals Gpu/WithIntervals
  NearExactAndEmulated/D64_bf16_4_Ws NearExactAndEmulated/D64_fp16_2_TopLeft_Mma
  NearExactAndEmulated/D64_bf16_4_Block_Mma NearExactAndEmulated/D64_fp16_1_TopLeft_Qk16
  NearExactAndEmulated/D64_bf16_2_Gradients16 */D64_fp16_2_TopLeft_Mma
  QueriesThatSeeNothing/D64_bf16_1_BottomRight OddLengths/D64_bf16_4_Ws)
list(TRANSFORM with_intervals REPLACE "WithIntervals/" "WithIntervals.")
simulated_test(Intervals "${with_intervals};OnGpu.OneHole*" SIMULATOR_SEED=5)
# Each family's masks and score functions, which tests/simulated_python has more of.
simulated_cases(with_mask Gpu/WithMask
  NearExactAndEmulated/D64_bf16_Ws_Tiles OddLengths/D64_fp16_Mma_TopLeft_Documents
  OddLengths/D64_bf16_128x64_Prefix)
list(TRANSFORM with_mask REPLACE "WithMask/" "WithMask.")
simulated_test(Masks "${with_mask};MaskBits.*;MaskEvaluated.*" SIMULATOR_SEED=5)
simulated_cases(with_score Gpu/WithScore
  NearExactAndEmulated/D64_bf16_Softcap OddLengths/D64_bf16_BottomRight_Mma_Bias
  GradientThroughLse/D64_bf16_Softcap OddLengths/D64_bf16_Dv16_Branched)
list(TRANSFORM with_score REPLACE "WithScore/" "WithScore.")
simulated_test(Scores "${with_score};ScoreBeside.*;ScoreEvaluated.*" SIMULATOR_SEED=5)
# Two families. tests/simulated_python has the third, every format of S, lists, masks and score
# functions.
simulated_cases(max_logits Gpu/MaxLogits.N* D64_fp16_Row Mma_D64_fp16_Row_TopLeft)
simulated_test(MaxLogits "${max_logits}" SIMULATOR_SEED=5)
simulated_test(OrderLists "OrderLists.*") # an order that leaves a list out shows here alone
simulated_test(Linear "Gpu/Linear.*/D64_bf16*;Gpu/Linear.*/D128_fp16*" SIMULATOR_SEED=3)
simulated_test(LinearSums "Gpu/LinearSums.*/D64_3*;Gpu/LinearSums.*/D64_70Blocks_fp16;\
Gpu/LinearSums.*/D64_LongLists;Gpu/LinearSums.*/D64_RunsOfTiles;Gpu/LinearSums.*/D128_4Lists_8Blocks"
               SIMULATOR_SEED=3)
# The formulas of every form; what else is asked of them, of two.
simulated_test(Mixture "Gpu/Mixture.Both*;Gpu/Mixture.*/D64_complement;Gpu/Mixture.*/D64_rest;\
CMixture.*;Gpu/SharedDout.*/D128_all_fp16" SIMULATOR_SEED=3)
simulated_test(Route "Gpu/TopBlocks.*;Gpu/PoolBlocks.*;Router.*" SIMULATOR_SEED=3)
simulated_test(Front "Gpu/Front.*;FrontOf.*;CFront.*;Gpu/Gate.*;CGate.*" SIMULATOR_SEED=3)
simulated_test(RouteBlocks "Gpu/RouteBlocks.*;RouteOf.*" SIMULATOR_SEED=3)
simulated_test(Estimated "Gpu/Estimated.*" SIMULATOR_SEED=3)
# Against FP64 and the emulation. Bits of dense kernels: of what 64 channels do not have.
simulated_test(ListsOfWideHeads "Gpu/Listed.Em*/D128_*;Gpu/Listed.Em*/D72_*;\
Gpu/Listed.Ev*/D128*Turns")
# Each family, what its kernels do with values of FP16's range, and what is not smoothed.
simulated_cases(listed_non_finite Gpu/ListedNonFinite.SeenWhereListsShowThemAndNowhereElse
  D64_bf16_128x64_Block_TopLeft D64_bf16_128x64_HalfDp
  D64_bf16_128x128_BottomRight_Ws D64_bf16_128x64_Unsmoothed)
simulated_test(ListedNonFinite "${listed_non_finite}")
simulated_test(Zeros "Gpu/Zeros.*/D64_bf16_Row_TopLeft;Gpu/Zeros.*/Mma_D64_fp16_Row_TopLeft;\
Gpu/Zeros.*/SmoothQ_D64*")
simulated_test(ScoresFarBelowZero "Gpu/SomeNumerics.ScoresFarBelowZero/*Unsmoothed*")
simulated_test(NonFinite "Gpu/NonFinite.*/D64_fp16_Block_TopLeft;Gpu/NonFinite.*/Fused_D64_bf16;\
Gpu/NonFinite.*/Fp16Sums_D64_bf16;Gpu/NonFinite.*/SmoothQ_D64*;\
Gpu/NonFinite.*/HalfDp_D64_bf16;Gpu/NonFinite.*/HalfDp_Fused_D64_bf16_TopLeft")
simulated_test(DqSums "Gpu/DqSums*" SIMULATOR_SEED=5)
# The least and the greatest width, split and fused; of the others HalfDp and Lengths have the kernels.
simulated_cases(bits_of_half_dp Gpu/BitsOfHalfDp.*
  D64_fp16 D64_bf16_TopLeft D256_fp16 Fused_D64_fp16_TopLeft)
simulated_test(BitsOfHalfDp "${bits_of_half_dp}" SIMULATOR_SEED=7)
# Each precision, width and family; those with every constant are in Lengths, and 256 channels in
# BitsOfHalfDp. Of packed sequences V's mean is another, which the split and the fused kernels take
# from the same pre-pass.
simulated_cases(half_dp Gpu/HalfDp.*
  HalfDp_D64_fp16_Block_TopLeft HalfDp_D128_bf16_Qk16_Unsmoothed HalfDp_D72_bf16_Dv16_TopLeft
  HalfDp_Fused_D64_bf16_TopLeft Turns_HalfDp_D160_fp16_Gradients16_BottomRight)
simulated_test(HalfDp "${half_dp};Gpu/HalfDpOfBf16.*;Gpu/ValueDim.*/HalfDp*;\
Gpu/Packed.EachSequenceIsAsIfAlone/HalfDp_D64*")
simulated_test(DpStart "Gpu/DpStart.*" SIMULATOR_SEED=6)
simulated_test(Tiles "Gpu/AnyTile.*/D64_TopLeft")
simulated_test(SharedKernels "OnGpu.WindowsOfAllSizesHaveOneSetOfKernels")
# What other GPUs' default tiles are, and what the templates do for their architectures. What the
# other kernels are compiled to for 8.9 is, to the byte, what they are for 8.0 or 12.0.
set(of_8.0 D128_bf16_Row D64_fp16_Qk16_TopLeft NotDeterministic_D64_bf16_TopLeft)
set(of_8.9 D128_bf16_Row Ordered_D128_fp16) # of short calls, and of others
set(of_12.0 ${of_8.0})
set(lengths_8.9 ";ByLength.*")
foreach(capability 8.0 8.9 12.0)
  simulated_cases(of_gpu Gpu/Numerics.AnyLengths ${of_${capability}})
  simulated_test(Capability_${capability} "${of_gpu}${lengths_${capability}}" SIMULATOR_CAPABILITY=${capability})
endforeach()
foreach(short Arguments CDoor GroupedQueries) # which `./run test quick` has too
  set_tests_properties(Simulated.${short} PROPERTIES LABELS simulated)
endforeach()
# C99, and the program that says how to call it.
add_test(NAME Simulated.CExample COMMAND ${simulator}/simulate $<TARGET_FILE:sagebwd_c_example>)
set_tests_properties(Simulated.CExample PROPERTIES LABELS simulated TIMEOUT ${test_limit})
# SLA2 without PyTorch, as a program that links the static library does it.
add_test(NAME Simulated.SparseLinearExample
         COMMAND ${simulator}/simulate $<TARGET_FILE:sagebwd_sparse_linear_example>)
set_tests_properties(Simulated.SparseLinearExample PROPERTIES LABELS "simulated;heavy"
                     TIMEOUT ${test_limit})
# The command line's judge of it, which tests/gpu/mixture_test.cpp does not know. Among these is a
# problem whose gradients all cancel, of one key that no list has.
add_test(NAME Simulated.Verify
         COMMAND ${simulator}/simulate $<TARGET_FILE:sagebwd> verify --cases 12 --seed 20261128
                 --max-len 420 --spec "d64 sparse_q=128 sparse_kv=64 linear=complement")
# And here each query with a list sees one key, without a sink.
add_test(NAME Simulated.VerifyOneKey
         COMMAND ${simulator}/simulate $<TARGET_FILE:sagebwd> verify --cases 1 --seed 20261341
                 --max-len 420 --spec
                 "d64 causal=bottom-right gradients16 sparse_q=128 sparse_kv=64")
set_tests_properties(Simulated.Verify Simulated.VerifyOneKey
                     PROPERTIES LABELS "simulated;heavy" TIMEOUT ${test_limit})
# What mask and score function index is no call's here. No other test has this spec, whose records
# stay.
add_test(NAME Simulated.TuneExpressions
         COMMAND ${simulator}/simulate $<TARGET_FILE:sagebwd> tune --force --seq-len 128 --heads 1
                 --head-dim 64 --mask "a[q]==a[k]" --score "s+c[h,k-q+3]")
set_tests_properties(Simulated.TuneExpressions PROPERTIES LABELS "simulated;heavy"
                     TIMEOUT ${test_limit})
# Of these three have score functions, two masks, and one lists of blocks.
add_test(NAME Simulated.VerifyExpressions
         COMMAND ${simulator}/simulate $<TARGET_FILE:sagebwd> verify --cases 8 --seed 18237
                 --max-len 200 --head-dim 64 --dtype bf16 --causal none --granularity row
                 --precision gradients16)
set_tests_properties(Simulated.VerifyExpressions PROPERTIES LABELS "simulated;heavy"
                     TIMEOUT ${test_limit})
add_test(NAME Simulated.VerifyIntervals
         COMMAND ${simulator}/simulate $<TARGET_FILE:sagebwd> verify --cases 24 --seed 100
                 --max-len 300 --head-dim 64 --dtype bf16 --causal bottom-right
                 --granularity row,block --precision six-of-seven --intervals 1,2)
set_tests_properties(Simulated.VerifyIntervals PROPERTIES LABELS "simulated;heavy"
                     TIMEOUT ${test_limit})
add_test(NAME Simulated.CatchesBrokenTemplates
         COMMAND ${PROJECT_SOURCE_DIR}/tests/simulator/catches.sh ${PROJECT_SOURCE_DIR}/templates
                 ${simulator}/simulate $<TARGET_FILE:gpu_tests>)
set_tests_properties(Simulated.CatchesBrokenTemplates PROPERTIES LABELS "simulated;heavy"
                     TIMEOUT ${test_limit} COST 40)
