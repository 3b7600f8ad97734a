"""The mistakes that tools/mutation_check.py makes in the attention sources.

Each is (name, file, old, new): `old` occurs exactly once in `file`. What has no
`old` that one could break without a test noticing belongs into a test first.

SPDX-License-Identifier: Apache-2.0
"""

ARGS = "kernels/args.h"
ATTEND = "kernels/attend-inl.h"
PASS_TILE = "kernels/pass_tile-inl.h"
WORKSPACE = "kernels/workspace-inl.h"
ROWS = "kernels/rows-inl.h"
TILE = "kernels/tile-inl.h"
VEC = "kernels/vec-inl.h"
MODIFY = "kernels/modify-inl.h"
WRITE = "kernels/write-inl.h"
MERGE = "kernels/merge_states-inl.h"
PLAN = "attention/plan.cc"
OWNER = "attention/owner.cc"
RUN = "attention/run.cc"

MUTATIONS = [
    # --- bounds and masks ---
    ("row sees one key less", PASS_TILE,
     "place.high - tile_begin,", "place.high - 1 - tile_begin,"),
    ("row starts one key late", PASS_TILE,
     "place.low - tile_begin,", "place.low + 1 - tile_begin,"),
    ("row sees one key too many", ARGS,
     "first_position + token + 1 + right",
     "first_position + token + 2 + right"),
    ("window one key short", ARGS,
     "first_position + token - left;", "first_position + token - left + 1;"),
    ("window one key long", ARGS,
     "first_position + token - left;", "first_position + token - left - 1;"),
    ("prefix ignored", ARGS,
     "own > prefix ? own : prefix", "own"),
    ("mask on the wrong side", ROWS,
     "hn::IfThenElse(seen, s, minus_inf)",
     "hn::IfThenElse(seen, minus_inf, s)"),
    ("left mask misses its first key", ROWS,
     "if (first > 0) {", "if (first > 1) {"),
    ("later rows decide where a chunk begins", ATTEND,
     "ws.places[row_begin].low", "ws.places[row_end - 1].low"),
    ("masked values multiplied by zero", PASS_TILE,
     "    if (view.interior) {\n", "    if (view.interior || R > 1) {\n"),
    ("right window taken for the left one", PLAN,
     "mask.window_left < 0 ? RowMask::kAll : mask.window_left",
     "mask.window_right < 0 ? RowMask::kAll : mask.window_right"),
    ("later rows' block ids not validated", PLAN,
     "DivCeil<int64_t>(mask.high(q_len - 1), block_size)",
     "DivCeil<int64_t>(mask.high(0), block_size)"),
    # --- blocks, tiles, rows ---
    ("neighbouring token groups swapped", WORKSPACE,
     "begin + g * kGroupTokens, first",
     "begin + (g ^ 1) * kGroupTokens, first"),
    ("block of the next token group read", WORKSPACE,
     "kv.block_table[token >> kv.block_size_log2]",
     "kv.block_table[HWY_MIN(token + kGroupTokens, last) >>\n"
     "                       kv.block_size_log2]"),
    ("tail of ragged rows skipped", PASS_TILE,
     "spans[r].end / kPack, false, spans[r].end % kPack != 0,",
     "common_end, false, spans[r].end % kPack != 0,"),
    ("half step keeps the odd partner", TILE,
     "kEven ? Ops::DropOdd(pair)", "kEven ? pair"),
    ("half step at the left edge dropped", PASS_TILE,
     "spans[r].begin % kPack != 0,", "false,"),
    ("wrong KV head", RUN,
     "kv_.k(0, layer_, head)", "kv_.k(0, layer_, 0)"),
    ("wrong query head of the group", ATTEND,
     "args, place.token, place.head, ws.floats,",
     "args, place.token, (place.head + 1) % args.group, ws.floats,"),
    ("sign of a negative scale ignored", ROWS,
     "args.negate_q ? -1.0f : 1.0f", "args.negate_q ? 1.0f : 1.0f"),
    ("cache write one token off", WRITE,
     "static_cast<size_t>(args.offset) * kX",
     "static_cast<size_t>(args.offset ^ 1) * kX"),
    ("owner search off by one", OWNER,
     "+ i <= block;", "+ i < block;"),
    ("a pair's second tile not visited", ATTEND,
     "pair.tiles = t + kKeyTile < high ? kPair : 1;", "pair.tiles = 1;"),
    ("a pair's second tile read from the first", PASS_TILE,
     "pair_.pages->k + tile * kGroups", "pair_.pages->k"),
    # --- softmax ---
    ("rescaled before the tile before was added", PASS_TILE,
     "[&]() HWY_ATTR { AddPending(0); }", "[&]() HWY_ATTR {}"),
    ("rescale inverted", ROWS,
     "Broadcast(state.max - new_max)", "Broadcast(new_max - state.max)"),
    ("rescale not applied to the sum", ROWS,
     "hn::Mul(LoadF(lanes + i), alpha)", "LoadF(lanes + i)"),
    ("rescale not applied to the values", ROWS,
     "hn::Mul(LoadF(acc + i), alpha)", "LoadF(acc + i)"),
    ("stale maximum", ROWS,
     "state.max = new_max;\n  state.threshold",
     "state.max = state.max == kMinusInf ? new_max : state.max;\n"
     "  state.threshold"),
    ("last token group missing from the sum", ROWS,
     "for (int g = 0; g < kGroups; ++g) {\n      sum",
     "for (int g = 0; g < kGroups - 1; ++g) {\n      sum"),
    ("a lane missing from the sum", VEC,
     "(four[0] + four[2]) + (four[1] + four[3])",
     "(four[0] + four[2]) + four[1]"),
    ("NaN hidden by the exponential's floor", VEC,
     "hn::Max(floor, x)", "hn::Max(x, floor)"),
    ("LSE in log2 units", ROWS,
     "kLn2 = 0.693147180559945309417", "kLn2 = 1.0"),
    ("weights truncated to bf16", VEC,
     "hn::Set(du, 0x7fff)", "hn::Set(du, 0)"),
    ("row that sees nothing not written", ROWS,
     "if (state.max == kMinusInf) {  // saw nothing", "if (false) {"),
    # --- modifiers and sinks ---
    ("softcap skipped", MODIFY,
     "if (args.softcap != 0) {", "if (args.softcap < 0) {"),
    ("scale applied twice", PASS_TILE,
     "modified ? 1.0f : args.scale_log2", "args.scale_log2"),
    ("ALiBi sign", MODIFY,
     "args.alibi_slopes[head] * kLog2E", "args.alibi_slopes[head] * -kLog2E"),
    ("ALiBi slope of another head", PASS_TILE,
     "ModifyScores(args, place.head,", "ModifyScores(args, 0,"),
    ("ALiBi restarts every vector", MODIFY,
     "distance + static_cast<float>(i)", "distance"),
    ("sink doubled", ROWS,
     "state.sum += Exp2Scalar", "state.sum += 2.0f * Exp2Scalar"),
    ("sink in every partition", ATTEND,
     "    state = merged;",
     "    if (args.sinks != nullptr) {\n"
     "      AddSink<Ops>(args.sinks[row % args.group], merged,\n"
     "                   ws.acc_floats);\n"
     "    }\n    state = merged;"),
    ("sink of another head", RUN,
     "tensors_.sinks + q_head", "tensors_.sinks"),
    # --- partitions ---
    ("partition dropped", RUN,
     "args.partition_end = work.partition_end;\n  Finish",
     "args.partition_end = std::max(work.partition_begin + 1,\n"
     "                                work.partition_end - 1);\n  Finish"),
    ("merge skips a partial", ATTEND,
     "p < args.num_partials; ++p", "p < args.num_partials - 1; ++p"),
    ("merge skips the first partial", ATTEND,
     "MergeState<Ops>(state, record[0], record[1], record + kLanes, "
     "acc_floats);",
     "if (p > 0) MergeState<Ops>(state, record[0], record[1], "
     "record + kLanes, acc_floats);"),
    ("partials folded backwards", ATTEND,
     "MergeState<Ops>(state, record[0], record[1], record + kLanes, "
     "acc_floats);",
     "const float* other =\n"
     "          record + args.partial_stride * (args.num_partials - 1 - 2 * p);"
     "\n"
     "      MergeState<Ops>(state, other[0], other[1], other + kLanes,\n"
     "                      acc_floats);"),
    ("merge weights swapped", ROWS,
     "hn::Mul(LoadF(into.acc + i), a)", "hn::Mul(LoadF(into.acc + i), b)"),
    ("arrivals not reset", RUN,
     "arrived.store(0, std::memory_order_relaxed);  // for the next layer", ""),
    ("query blocks share their partials", RUN,
     "plan_->partial_base[at] + item.first_token * plan_->group)",
     "plan_->partial_base[at])"),
    # --- merging finished rows ---
    ("merged state weighed inversely", MERGE,
     "(lse - largest) * kLog2E", "(largest - lse) * kLog2E"),
    ("merged LSE forgets the sum", MERGE,
     "static_cast<double>(largest) +\n"
     "                                       "
     "std::log(static_cast<double>(sum))",
     "static_cast<double>(largest)"),
    ("later state replaces the first", MERGE,
     "    first = false;", "    first = true;"),
]
