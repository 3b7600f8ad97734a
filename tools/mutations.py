"""The mistakes that tools/mutation_check.py makes in the attention sources.

Each is (name, file, old, new): `old` occurs exactly once in `file`. What has no
`old` that one could break without a test noticing belongs into a test first.

SPDX-License-Identifier: Apache-2.0
"""

ARGS = "kernels/args.h"
ATTEND = "kernels/attend-inl.h"
GROUP_PASS = "kernels/group_pass-inl.h"
RUN_PASS = "kernels/run_pass-inl.h"
WORKSPACE = "kernels/workspace-inl.h"
ROWS = "kernels/rows-inl.h"
SOFTMAX = "kernels/softmax-inl.h"
TILE = "kernels/tile-inl.h"
VEC = "kernels/vec-inl.h"
WIDEN = "kernels/widen-inl.h"
MODIFY = "kernels/modify-inl.h"
WRITE = "kernels/write-inl.h"
MERGE = "kernels/merge_states-inl.h"
PLAN = "attention/plan.cc"
OWNER = "attention/owner.cc"
RUN = "attention/run.cc"

MUTATIONS = [
    # --- bounds and masks ---
    ("row sees one key less", GROUP_PASS,
     "place.high - tile_begin,", "place.high - 1 - tile_begin,"),
    ("row starts one key late", GROUP_PASS,
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
    ("mask on the wrong side", SOFTMAX,
     "hn::IfThenElse(seen, LoadF(scores + at), minus_inf)",
     "hn::IfThenElse(seen, minus_inf, LoadF(scores + at))"),
    ("left mask misses its first key", SOFTMAX,
     "HWY_MAX(begin - at, 0)", "HWY_MAX(begin - 1 - at, 0)"),
    ("later rows decide where a chunk begins", ATTEND,
     "partition * kPartition, first_row.low",
     "partition * kPartition, last_row.low"),
    ("masked values multiplied by zero", GROUP_PASS,
     "AddValues(whole);", "AddValues((tile + 1) * kTileSteps<Ops>);"),
    ("a tile's last scores not masked", GROUP_PASS,
     "MaskScores(0, end, ws_", "MaskScores(0, kKeyTile, ws_"),
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
    ("tail of ragged rows skipped", GROUP_PASS,
     "spans[r].end / kPack, false, spans[r].end % kPack != 0,",
     "common_end, false, spans[r].end % kPack != 0,"),
    ("half step keeps the odd partner", TILE,
     "kEven ? Ops::DropOdd(pair)", "kEven ? pair"),
    ("half step at the left edge dropped", GROUP_PASS,
     "spans[r].begin % kPack != 0,", "false,"),
    ("wrong KV head", RUN,
     "kv_.k(0, layer_, head)", "kv_.k(0, layer_, 0)"),
    ("wrong query head of the group", RUN_PASS,
     "QueryRow(*run.args, place.token, place.head), ws.floats,",
     "QueryRow(*run.args, place.token, (place.head + 1) % run.args->group),\n"
     "        ws.floats,"),
    ("q packed by the first of split partitions only", ATTEND,
     "HWY_MAX(args.partition_begin, first_row.low / kPartition)",
     "first_row.low / kPartition"),
    ("sign of a negative scale ignored", ROWS,
     "args.negate_q ? -1.0f : 1.0f", "args.negate_q ? 1.0f : 1.0f"),
    ("cache write one token off", WRITE,
     "static_cast<size_t>(args.offset) * kX",
     "static_cast<size_t>(args.offset ^ 1) * kX"),
    ("owner search off by one", OWNER,
     "+ i <= block;", "+ i < block;"),
    ("a run's later tiles not visited", ATTEND,
     "run.tiles = static_cast<int>(", "run.tiles = 0 * static_cast<int>("),
    ("a run's tiles all read from the first", GROUP_PASS,
     "run_.pages->k + tile * kGroups, run_.key_stride,\n"
     "        static_cast<size_t>(ws_.steps), side,",
     "run_.pages->k, run_.key_stride,\n"
     "        static_cast<size_t>(ws_.steps), side,"),
    ("a run's weights all stand in its first tile", GROUP_PASS,
     "Weights(tile * kTileSteps<Ops>)};", "Weights(0)};"),
    ("groups' weights of a tile all stand in one place", GROUP_PASS,
     "(slot_ % kRun - tile) * kTileSteps<Ops>;", "-tile * kTileSteps<Ops>;"),
    ("a ninth group's weights stand in the first's place", GROUP_PASS,
     "slot_ / kRun * kMaxRows * kRunSteps<Ops> +", "0 +"),
    ("a tile's edges added as if all saw all of it", RUN_PASS,
     "group, tile, unadded[group.slot]);\n      } else",
     "group, tile, Unadded::kWhole);\n      } else"),
    ("a tile's edges not added", RUN_PASS,
     "if (unadded[group.slot] == Unadded::kNothing) continue;",
     "if (unadded[group.slot] != Unadded::kWhole) continue;"),
    ("rows without weights added at a tile's edges", GROUP_PASS,
     "DropUnseen(spans);\n    AddRagged", "AddRagged"),
    ("weights of the tile before a ragged one forgotten", GROUP_PASS,
     "void RaggedTile(int tile) {\n    Soften();",
     "void RaggedTile(int tile) {\n    softening_ = -1;"),
    ("weights of the tile before the last one forgotten", GROUP_PASS,
     "void LastTile(int tile, int end) {\n    Soften();",
     "void LastTile(int tile, int end) {\n    softening_ = -1;"),
    ("half a last tile's weights", GROUP_PASS,
     "soften.Row(r, halves)", "soften.Row(r, 1)"),
    # --- softmax ---
    ("rescaled before the tiles before were added", GROUP_PASS,
     "[&]() HWY_ATTR { AddValues(tile * kTileSteps<Ops>); }",
     "[&]() HWY_ATTR {}"),
    ("only the last row decides whether a tile is steady", TILE,
     "steady = hn::And(steady, hn::Le",
     "steady = hn::And(hn::FirstN(D(), kN), hn::Le"),
    ("rescale inverted", SOFTMAX,
     "Rescale<Ops>(state.max - new_max", "Rescale<Ops>(new_max - state.max"),
    ("rescale not applied to the sum", SOFTMAX,
     "hn::Mul(LoadF(lanes + i), alpha)", "LoadF(lanes + i)"),
    ("rescale not applied to the values", SOFTMAX,
     "hn::Mul(LoadF(acc + i), alpha)", "LoadF(acc + i)"),
    ("stale maximum", SOFTMAX,
     "state.max = new_max;",
     "if (state.max == kMinusInf) state.max = new_max;"),
    ("last token group missing from the sum", SOFTMAX,
     "sum = hn::Add(sum, weights[v]);",
     "if (half == 0 || v + 1 < kHalfVecs) sum = hn::Add(sum, weights[v]);"),
    ("half a row weighed with its neighbour's scores", SOFTMAX,
     "if (index + 1 < kPortions) Begin(index + 1, state);",
     "if (index % 2 == 0) Begin(index + 1, state);"),
    ("last half row never weighed", TILE,
     "side.Portion(i - 1, state);",
     "if (i + 1 != kParts) side.Portion(i - 1, state);"),
    ("weights not computed where softmax runs apart", GROUP_PASS,
     "Soften();\n          return Steady",
     "softening_ = -1;\n          return Steady"),
    ("sixth row multiplied by the fourth's operands", TILE,
     ": r == 5 ? fifth", ": r == 5 ? third"),
    ("odd tokens multiplied by even operands", TILE,
     "Broadcast(by(r)->odd)", "Broadcast(by(r)->even)"),
    ("a widened group's last value vector left out", WIDEN,
     "GroupElements(acc_floats) / kN / Pool::kPack,",
     "GroupElements(acc_floats) / kN / Pool::kPack - 1,"),
    ("a widened tile's keys taken for its values", WIDEN,
     "WidenGroups(pages.v + tile * kGroups",
     "WidenGroups(pages.k + tile * kGroups"),
    ("the first widened tile taken for all", WIDEN,
     "pages.k + tile * kGroups, wide.k", "pages.k, wide.k"),
    ("odd steps of a widened group repeat even ones", WIDEN,
     "static_cast<size_t>(step) * key_stride",
     "static_cast<size_t>(step / 2 * 2) * key_stride"),
    ("the two of a widened pair swapped", VEC,
     "return {LoadF(floats), LoadF(floats + kN)};",
     "return {LoadF(floats + kN), LoadF(floats)};"),
    ("half the exponential's table", VEC,
     "hn::And(bits, hn::Set(DI(), 7))", "hn::And(bits, hn::Set(DI(), 3))"),
    ("a lane missing from the sum", VEC,
     "(four[0] + four[2]) + (four[1] + four[3])",
     "(four[0] + four[2]) + four[1]"),
    ("NaN hidden by the exponential's floor", VEC,
     "hn::Max(floor, x)", "hn::Max(x, floor)"),
    ("LSE in log2 units", ROWS,
     "kLn2 = 0.693147180559945309417", "kLn2 = 1.0"),
    ("infinite values divided into NaN", ROWS,
     "if (HWY_LIKELY(hn::AllFalse(D(), hn::IsNaN(odd)))) return;", "return;"),
    ("weights truncated to bf16", VEC,
     "hn::Set(du, 0x7fff)", "hn::Set(du, 0)"),
    ("row that sees nothing not written", ROWS,
     "if (state.max == kMinusInf) {  // saw nothing", "if (false) {"),
    # --- modifiers and sinks ---
    ("softcap skipped", MODIFY,
     "if (args.softcap != 0) {", "if (args.softcap < 0) {"),
    ("scale applied twice", GROUP_PASS,
     "modified_ ? 1.0f : args_.scale_log2", "args_.scale_log2"),
    ("ALiBi sign", MODIFY,
     "args.alibi_slopes[head] * kLog2E", "args.alibi_slopes[head] * -kLog2E"),
    ("ALiBi slope of another head", GROUP_PASS,
     "ModifyScores(args_, place_[r].head,", "ModifyScores(args_, 0,"),
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
     "args.partition_end = work.partition_end;",
     "args.partition_end = std::max(work.partition_begin + 1,\n"
     "                                work.partition_end - 1);"),
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
    # --- several KV heads a threadgroup ---
    ("a KV head reads its neighbour's keys", WORKSPACE,
     "from.k[g] + heads * args.k_head_bytes",
     "from.k[g] + (heads - 1) * args.k_head_bytes"),
    ("all KV heads read the first one's values", WORKSPACE,
     "from.v[g] + heads * args.v_head_bytes", "from.v[g]"),
    ("all KV heads' rows are the first one's", WORKSPACE,
     "    ws.places[row].head += args.group;\n", ""),
    ("KV heads' partials written over each other", ATTEND,
     "head * args.partials_head_stride +", "0 * args.partials_head_stride +"),
    ("partials of the first KV head merged only", RUN,
     "head < plan_->heads_together; ++head) {\n    merge",
     "head < 1; ++head) {\n    merge"),
    ("many rows of one KV head computed only", RUN,
     "for (int head = 0; head < heads; head += step)",
     "for (int head = 0; head < step; head += step)"),
    ("KV heads of two shards together", PLAN,
     "plan->layout.num_kv_heads / plan->view_shards",
     "plan->layout.num_kv_heads"),
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
