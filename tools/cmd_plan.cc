// varlane plan: the KV budget of a model on this machine, term by term.
//
// SPDX-License-Identifier: Apache-2.0

#include <memory>
#include <string>
#include <vector>

#include "tools/flags.h"
#include "tools/parse.h"
#include "tools/plan_watch.h"
#include "tools/report.h"
#include "tools/status_util.h"
#include "varlane/kv_layout.h"
#include "varlane/memory_budget.h"

namespace varlane::tools {
namespace {

using Align = Table::Align;

// n_ctx of the committed policy where nobody says otherwise.
constexpr int64_t kDefaultContext = 32768;

struct PlanFlags {
  ModelFlags model;
  int v_head_size = 0;  // 0 = head size
  DType kv_dtype = DType::kBF16;
  int block_size = 16;
  BudgetRequest request;
  double fraction = 0;  // 0 = environment
  std::string json;
  bool watch = false;
  PlanWatchOptions watching;  // memory_root is used without --watch as well
};

KvLayout MakeLayout(const PlanFlags& flags, const ModelShape& model) {
  KvLayout layout;
  layout.dtype = flags.kv_dtype;
  layout.num_layers = model.num_layers;
  layout.num_kv_heads = model.num_kv_heads;
  layout.head_size = model.head_size;
  layout.v_head_size =
      flags.v_head_size != 0 ? flags.v_head_size : model.head_size;
  layout.block_size = flags.block_size;
  return layout;
}

// The other policies with the same request; what a policy lacks is left out.
Result<std::vector<MemoryBudget>> PlanAll(const BudgetRequest& request,
                                          const KvLayout& layout,
                                          const MemoryLimits& limits) {
  std::vector<MemoryBudget> budgets;
  for (const BudgetPolicy policy :
       {BudgetPolicy::kClaim, BudgetPolicy::kCapped, BudgetPolicy::kCommitted,
        BudgetPolicy::kFixed}) {
    const bool has_size = request.fixed_bytes > 0 || request.fixed_tokens > 0;
    if (policy == BudgetPolicy::kFixed && !has_size) continue;
    BudgetRequest other = request;
    other.policy = policy;
    VARLANE_TOOLS_ASSIGN(MemoryBudget budget,
                         PlanMemoryBudget(other, layout, limits));
    budgets.push_back(std::move(budget));
  }
  return budgets;
}

std::string DerivationText(const MemoryBudget& budget) {
  Table table({Align::kLeft, Align::kRight, Align::kLeft});
  for (const BudgetTerm& term : budget.terms) {
    table.AddRow({term.name, FormatBytes(term.bytes), term.note});
  }
  return table.ToString();
}

std::string PoliciesText(const std::vector<MemoryBudget>& budgets,
                         BudgetPolicy chosen) {
  Table table({Align::kLeft, Align::kRight, Align::kRight, Align::kRight,
               Align::kLeft});
  table.AddRow({"policy", "KV bytes", "blocks", "tokens", ""});
  bool has_fixed = false;
  for (const MemoryBudget& budget : budgets) {
    has_fixed = has_fixed || budget.policy == BudgetPolicy::kFixed;
    std::string note = budget.granted ? "granted" : "refused";
    if (budget.policy == chosen) note += " (chosen)";
    table.AddRow({BudgetPolicyName(budget.policy), FormatBytes(budget.bytes),
                  FormatCount(budget.blocks), FormatCount(budget.tokens),
                  note});
  }
  if (!has_fixed) {
    table.AddRow({"fixed", "-", "-", "-", "needs --kv-bytes or --kv-tokens"});
  }
  return table.ToString();
}

Json BudgetToJson(const MemoryBudget& budget) {
  Json terms = Json::array();
  for (const BudgetTerm& term : budget.terms) {
    terms.push_back(
        {{"name", term.name}, {"bytes", term.bytes}, {"note", term.note}});
  }
  return {{"policy", BudgetPolicyName(budget.policy)},
          {"granted", budget.granted},
          {"bytes", budget.bytes},
          {"blocks", budget.blocks},
          {"tokens", budget.tokens},
          {"binding_limit", budget.binding_limit},
          {"refusal", budget.refusal},
          {"fitting_fraction", budget.fitting_fraction},
          {"terms", terms}};
}

Json LayoutToJson(const ModelShape& model, const KvLayout& layout) {
  return {{"model", model.name},
          {"layers", layout.num_layers},
          {"q_heads", model.num_q_heads},
          {"kv_heads", layout.num_kv_heads},
          {"head_size", layout.head_size},
          {"v_head_size", layout.v_head_size},
          {"kv_dtype", DTypeName(layout.dtype)},
          {"block_size", layout.block_size},
          {"block_bytes", layout.block_bytes()},
          {"token_bytes", layout.token_bytes()}};
}

std::string PlanText(const ModelShape& model, const KvLayout& layout,
                     const MemoryBudget& budget,
                     const std::vector<MemoryBudget>& all) {
  const std::string answer =
      budget.granted
          ? fmt::format("{} for KV: {} blocks, {} tokens",
                        FormatBytes(budget.bytes), FormatCount(budget.blocks),
                        FormatCount(budget.tokens))
          : fmt::format("refused: {}", budget.refusal);
  return fmt::format(
      "{}\nKV {}: {} a token, {} a block of {} tokens\n\nPolicy {}\n{}  "
      "binding limit: {}\n  => {}\n\nAll policies\n{}",
      DescribeModel(model), DTypeName(layout.dtype),
      FormatBytes(layout.token_bytes()), FormatBytes(layout.block_bytes()),
      layout.block_size, BudgetPolicyName(budget.policy),
      DerivationText(budget),
      budget.binding_limit.empty() ? "none" : budget.binding_limit, answer,
      PoliciesText(all, budget.policy));
}

Status RunPlan(const PlanFlags& flags) {
  VARLANE_TOOLS_ASSIGN(const ModelShape model, ResolveModel(flags.model));
  const KvLayout layout = MakeLayout(flags, model);
  VARLANE_TOOLS_TRY(layout.Validate());
  BudgetRequest request = flags.request;
  request.fraction = flags.fraction;
  if (request.fraction == 0) {
    VARLANE_TOOLS_ASSIGN(request.fraction, MemoryFractionFromEnvironment());
  }
  if (flags.watch) return WatchPlan(flags.watching, request, layout);
  VARLANE_TOOLS_ASSIGN(const MemoryLimits limits,
                       MemoryLimits::Detect(flags.watching.memory_root));
  VARLANE_TOOLS_ASSIGN(const MemoryBudget budget,
                       PlanMemoryBudget(request, layout, limits));
  VARLANE_TOOLS_ASSIGN(const std::vector<MemoryBudget> all,
                       PlanAll(request, layout, limits));
  Json policies = Json::array();
  for (const MemoryBudget& other : all) policies.push_back(BudgetToJson(other));
  const Json json = {{"shape", LayoutToJson(model, layout)},
                     {"total_bytes", limits.total_bytes},
                     {"available_bytes", limits.available_bytes},
                     {"budget", BudgetToJson(budget)},
                     {"policies", policies}};
  VARLANE_TOOLS_TRY(
      Emit(PlanText(model, layout, budget, all), json, flags.json));
  if (budget.granted) return {};
  return {StatusCode::kResourceExhausted, budget.refusal};
}

void AddBudgetFlags(CLI::App* command, PlanFlags* flags) {
  BudgetRequest* const request = &flags->request;
  const auto policy = [](const std::string& text) -> Result<BudgetPolicy> {
    if (const auto parsed = ParseBudgetPolicy(text)) return *parsed;
    return BadArgument("\"{}\" is not claim, capped, committed or fixed", text);
  };
  AddParsedOption(command, "--policy", &request->policy, policy,
                  "claim (default), capped, committed or fixed")
      ->type_name("NAME");
  command
      ->add_option("--fraction", flags->fraction,
                   "claim: share of all memory, (0, 1]; default "
                   "VARLANE_MEMORY_FRACTION or 0.9")
      ->check(CLI::Range(1e-6, 1.0))
      ->type_name("SHARE");
  AddBytesFlag(command, "--weights", &request->weights_bytes,
               "What the model's weights take, e.g. 1.2GB or 1.2GiB "
               "(default 0)");
  AddBytesFlag(command, "--profile-peak", &request->profile_peak_bytes,
               "Activations and scratch at their peak (default 0)");
  AddBytesFlag(command, "--hint", &request->hint_bytes,
               "capped: bytes wanted (default: the cap)");
  command
      ->add_option("--utilisation", request->utilisation,
                   "capped: share of the cap to use")
      ->capture_default_str()
      ->type_name("SHARE");
  request->context_tokens = kDefaultContext;
  command
      ->add_option("--context", request->context_tokens,
                   "committed: tokens of all sequences together")
      ->capture_default_str()
      ->type_name("TOKENS");
  AddBytesFlag(command, "--kv-bytes", &request->fixed_bytes,
               "fixed: this many bytes");
  command
      ->add_option("--kv-tokens", request->fixed_tokens,
                   "fixed: this many tokens")
      ->type_name("TOKENS");
}

void AddWatchFlags(CLI::App* command, PlanFlags* flags) {
  CLI::Option* const watch =
      command
          ->add_flag("--watch", flags->watch,
                     "Go on and print a line for each change of a limit, of "
                     "the memory pressure and of the plan, until SIGINT")
          ->excludes("--json");
  command
      ->add_option("--interval", flags->watching.interval_s,
                   "watch: seconds between two looks; pressure events are "
                   "seen at once")
      ->capture_default_str()
      ->check(CLI::Range(0.01, 86400.0))
      ->needs(watch)
      ->type_name("SECONDS");
  command
      ->add_option("--for", flags->watching.for_s,
                   "watch: end after so long (default: never)")
      ->check(CLI::Range(0.01, 1e9))
      ->needs(watch)
      ->type_name("SECONDS");
}

}  // namespace

void AddPlanCommand(CLI::App* app, Run* run) {
  const auto flags = std::make_shared<PlanFlags>();
  CLI::App* const command = app->add_subcommand(
      "plan",
      "Plan the KV pool of a model on this machine: every term, the binding "
      "limit, and all policies side by side");
  AddModelFlags(command, &flags->model);
  command
      ->add_option("--v-head-size", flags->v_head_size,
                   "Elements of a V head, where they differ from K's")
      ->type_name("N");
  AddDTypeFlag(command, "--kv-dtype", &flags->kv_dtype,
               "Elements of the cache: bf16 (default), f32 or f16");
  command
      ->add_option("--block-size", flags->block_size,
                   "Tokens of a block: 16, 32, 64, 128 or 256")
      ->capture_default_str()
      ->type_name("N");
  AddBudgetFlags(command, flags.get());
  AddJsonFlag(command, &flags->json);
  AddWatchFlags(command, flags.get());
  command->add_option("--memory-root", flags->watching.memory_root)->group("");
  command->footer(
      "Exit code 1 when the chosen policy is refused; with --watch 0.\n"
      "Examples:\n"
      "  varlane plan --model Qwen3-0.6B --weights 1.2GB\n"
      "  varlane plan --model Llama-3.1-8B --weights 16GB --fraction 0.8\n"
      "  varlane plan --layers 28 --kv-heads 8 --head-size 128 "
      "--policy fixed --kv-tokens 100000\n"
      "  varlane plan --model Qwen3-8B --policy committed --context 131072 "
      "--json plan.json\n"
      "  varlane plan --watch --for 60");
  command->callback([flags, run] {
    if (flags->model.model.empty() && flags->model.layers == 0) {
      flags->model.model = "Qwen3-0.6B";
    }
    *run = [flags] { return RunPlan(*flags); };
  });
}

}  // namespace varlane::tools
