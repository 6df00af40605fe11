// Draws programs from a seed, and runs them on tensors.
#include "core/autograd/executor/random_program.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace distgrad {
namespace {

using at::Tensor;
using at::indexing::Slice;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr int64_t kSize = 4;  // every value that operators exchange is a matrix of 4 x 4

// Draws the operands of a program's operators.
class Drawer {
 public:
  Drawer(uint64_t seed, at::ScalarType dtype) : dtype_(dtype), random_(seed) {}

  uint64_t Below(uint64_t limit) { return random_() % limit; }
  // A value made before; late ones are likelier, so that graphs get deep.
  Tensor Value() {
    const size_t back = Below(Below(values_.size()) + 1);
    return values_[values_.size() - 1 - back];
  }
  Tensor NewLeaf(at::IntArrayRef sizes) {
    leaves_.push_back(at::randn(sizes, dtype_).requires_grad_());
    return leaves_.back();
  }
  // For sparse gradients, which libtorch's CPU build does not add up in half precision.
  Tensor NewTable() {
    leaves_.push_back(
        at::randn({6, kSize}, dtype_ == at::kHalf ? at::kFloat : dtype_).requires_grad_());
    return leaves_.back();
  }
  void AddValue(Tensor value) { values_.push_back(std::move(value)); }
  at::ScalarType dtype() const { return dtype_; }
  std::vector<Tensor>& leaves() { return leaves_; }
  const std::vector<Tensor>& values() const { return values_; }

 private:
  const at::ScalarType dtype_;
  std::mt19937_64 random_;
  std::vector<Tensor> leaves_;
  std::vector<Tensor> values_;
};

// Two outputs of one function; its backward sees an undefined gradient for one that is unused.
struct SumAndProduct : torch::autograd::Function<SumAndProduct> {
  static variable_list forward(AutogradContext* context, const Variable& a, const Variable& b) {
    context->set_materialize_grads(false);
    context->save_for_backward({a, b});
    return {a + b, a * b};
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    Variable a = gradients[0], b = gradients[0];
    if (gradients[1].defined()) {
      a = a.defined() ? a + gradients[1] * saved[1] : gradients[1] * saved[1];
      b = b.defined() ? b + gradients[1] * saved[0] : gradients[1] * saved[0];
    }
    return {a, b};
  }
};

// Gradients that were never given arrive as zeros; writes in place.
struct NegateInPlace : torch::autograd::Function<NegateInPlace> {
  static variable_list forward(AutogradContext* context, Variable a) {
    a.neg_();
    context->mark_dirty({a});
    return {a, a * 2};
  }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    return {-gradients[0] - gradients[1] * 2};
  }
};

// Lets no gradient through to its second input.
struct First : torch::autograd::Function<First> {
  static Variable forward(AutogradContext*, const Variable& a, const Variable& b) { return a - b; }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    return {gradients[0], Variable()};
  }
};

// Computes again in backward, by a backward of its own, what forward did not save.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static Variable forward(AutogradContext* context, const Variable& a) {
    context->save_for_backward({a});
    const at::AutoGradMode off(false);
    return (a.tanh() * a).sin();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::AutoGradMode on(true);
    Variable a = context->get_saved_variables()[0].detach().requires_grad_();
    (a.tanh() * a).sin().backward(gradients[0]);
    return {a.grad()};
  }
};

Tensor Identity(at::ScalarType dtype) { return at::eye(kSize, dtype); }
Tensor Positive(const Tensor& a) {  // positive definite
  const Tensor d = a.to(at::kDouble).tanh();
  return d.mm(d.t()) + 4 * Identity(at::kDouble);
}
Tensor Numbers(at::IntArrayRef numbers) { return at::tensor(numbers); }
Tensor Rows(const Tensor& matrix, at::IntArrayRef rows) {
  return matrix.index_select(0, Numbers(rows));
}

struct Operator {
  const char* name;
  Tensor (*make)(Drawer& draw);
};

// One line or few for each; clang-format would make it four pages.
// clang-format off
const Operator kOperators[] = {
    {"add", [](Drawer& d) { return d.Value() + d.Value(); }},
    {"add_same", [](Drawer& d) { const Tensor a = d.Value(); return a + a; }},
    {"sub_scaled", [](Drawer& d) { return at::sub(d.Value(), d.Value(), 0.5); }},
    {"mul", [](Drawer& d) { return d.Value() * d.Value(); }},
    {"div", [](Drawer& d) { const Tensor b = d.Value(); return d.Value() / (b * b + 1); }},
    {"pointwise", [](Drawer& d) { return d.Value().exp().log1p().sqrt().tanh(); }},
    {"activation", [](Drawer& d) { return at::gelu(at::leaky_relu(at::silu(d.Value()))); }},
    {"where", [](Drawer& d) {
       const Tensor a = d.Value(), b = d.Value();
       return at::where(a > b, a.clamp(-1, 1), b.abs());
     }},
    {"broadcast", [](Drawer& d) { return d.Value() + d.NewLeaf({1, kSize}) * d.NewLeaf({}); }},
    {"mm", [](Drawer& d) { return d.Value().mm(d.Value()) * 0.25; }},
    {"addmm_bmm", [](Drawer& d) {
       const Tensor batch = at::stack({d.Value(), d.Value()});
       return at::addmm(d.Value(), at::bmm(batch, batch.transpose(1, 2))[0], d.Value()) * 0.1;
     }},
    {"einsum_linear", [](Drawer& d) {
       return at::linear(at::einsum("ij,kj->ik", {d.Value(), d.Value()}),
                         d.NewLeaf({kSize, kSize}), d.NewLeaf({kSize})) * 0.1;
     }},
    {"conv2d", [](Drawer& d) {
       return at::conv2d(d.Value().view({1, 1, kSize, kSize}), d.NewLeaf({1, 1, 3, 3}),
                         d.NewLeaf({1}), 1, 1).view({kSize, kSize}) * 0.3;
     }},
    {"channels_last", [](Drawer& d) {
       const Tensor a = at::stack({d.Value(), d.Value()}).unsqueeze(0);
       return at::conv2d(a.contiguous(at::MemoryFormat::ChannelsLast), d.NewLeaf({1, 2, 1, 1}))
           .view({kSize, kSize});
     }},
    {"pooling", [](Drawer& d) {
       const Tensor a = d.Value().view({1, 1, kSize, kSize});
       return at::max_pool2d(a, 3, 1, 1).view({kSize, kSize}) +
              at::avg_pool2d(a, 2).mean();
     }},
    {"batch_norm", [](Drawer& d) {
       return at::batch_norm(d.Value(), d.NewLeaf({kSize}), d.NewLeaf({kSize}), {}, {}, true, 0.1,
                             1e-3, false);
     }},
    {"layer_norm", [](Drawer& d) {
       return at::layer_norm(d.Value(), {kSize}, d.NewLeaf({kSize}), d.NewLeaf({kSize}));
     }},
    {"embedding", [](Drawer& d) {
       return at::embedding(d.NewLeaf({6, kSize}), Numbers({5, 0, 0, 2}));
     }},
    {"embedding_sparse", [](Drawer& d) {
       const Tensor table = d.NewTable();
       return (at::embedding(table, Numbers({5, 0, 0, 2}), -1, false, /*sparse=*/true) *
               at::embedding(table, Numbers({1, 0, 3, 2}), -1, false, /*sparse=*/true))
           .to(d.dtype());
     }},
    {"sparse_and_dense", [](Drawer& d) {
       const Tensor table = d.NewTable();
       const Tensor early = Rows(table, {0, 1, 2, 3});
       const Tensor sparse = at::embedding(table, Numbers({4, 1, 1, 2}), -1, false, true);
       return (sparse + early * d.Value() + Rows(table, {5, 5, 1, 0})).to(d.dtype());
     }},
    {"index", [](Drawer& d) {
       const Tensor a = d.Value();
       return a.index({Numbers({3, 0, 0, 1}), Slice()}) +
              a.gather(1, Numbers({0, 1, 1, 3}).expand({kSize, kSize})) +
              a.index({a > 0}).sum();
     }},
    {"scatter", [](Drawer& d) {
       const Tensor index = Numbers({0, 1, 1, 3}).expand({kSize, kSize});
       return d.Value().scatter_add(0, index, d.Value()).masked_fill(d.Value() > 0.7, 0.1) +
              d.Value().index_put({Numbers({1, 1})}, d.Value().slice(0, 0, 2), true);
     }},
    {"views", [](Drawer& d) {
       const Tensor a = d.Value();
       return a.t() + a.narrow(0, 1, 2).repeat({2, 1}) + a.diagonal().expand({kSize, kSize}) +
              a.as_strided({kSize, kSize}, {1, 2}) + a.unfold(0, 2, 2).sum(2).repeat({2, 1}) +
              a.select(0, 1).unsqueeze(1) + a.flip(0).roll(1, 1);
     }},
    {"reductions", [](Drawer& d) {
       const Tensor a = d.Value();
       return a.sum(0, true) + a.mean() + a.var(1).unsqueeze(1) + at::logsumexp(a, 1) +
              a.norm() + a.cumsum(1) + std::get<0>(a.max(1)) + a.amin(0) +
              std::get<0>(a.median(0)) + a.tanh().prod(1);
     }},
    {"cat_stack", [](Drawer& d) {
       const Tensor both = at::cat({d.Value(), d.Value()}, 1);
       return both.slice(1, 2, 6) + at::stack({d.Value(), d.Value(), d.Value()}).sum(0);
     }},
    {"split_unused", [](Drawer& d) {
       const std::vector<Tensor> parts = d.Value().split(1, 0);
       return at::cat({parts[1], parts[3], parts[1], parts[1].detach()}) +
              d.Value().unbind(1)[2];
     }},
    {"outputs_unused", [](Drawer& d) {
       return std::get<0>(d.Value().topk(2, 1)).repeat({1, 2}) +
              std::get<0>(d.Value().sort(0));
     }},
    {"softmax", [](Drawer& d) { return d.Value().softmax(1) + d.Value().log_softmax(0); }},
    {"losses", [](Drawer& d) {
       const Tensor a = d.Value(), b = d.Value();
       return a + at::mse_loss(a, b) + at::cross_entropy_loss(a, Numbers({0, 3, 1, 1})) +
              at::huber_loss(a, b) + at::binary_cross_entropy_with_logits(a, b.sigmoid());
     }},
    {"dropout", [](Drawer& d) { return at::dropout(d.Value(), 0.5, true); }},
    {"attention", [](Drawer& d) {
       return at::scaled_dot_product_attention(d.Value().unsqueeze(0).unsqueeze(0),
                                               d.Value().unsqueeze(0).unsqueeze(0),
                                               d.Value().unsqueeze(0).unsqueeze(0))[0][0];
     }},
    {"linalg", [](Drawer& d) {
       const Tensor p = Positive(d.Value());
       const Tensor all = at::linalg_inv(p) + at::linalg_cholesky(p) * 0.1 + p.logdet() * 0.1 +
                          at::linalg_solve(p, d.Value().to(at::kDouble)) +
                          std::get<0>(at::linalg_qr(p)) + at::linalg_eigvalsh(p) * 0.1;
       return all.to(d.dtype());
     }},
    {"complex", [](Drawer& d) {
       const Tensor c = at::complex(d.Value().to(at::kFloat), d.Value().to(at::kFloat));
       const Tensor e = (c * c.conj() + c.mm(c.t()) * 0.1).sin() + c.resolve_conj().exp() * 0.1;
       return (at::view_as_real(e).sum(2) + e.angle() + at::real(c).contiguous() + c.abs())
           .to(d.dtype());
     }},
    {"complex_double", [](Drawer& d) {
       const Tensor c = at::view_as_complex(
           at::stack({d.Value().to(at::kDouble), d.Value().to(at::kDouble)}, 2));
       return (at::imag(c / (c.abs() + 2)) + at::real(c.pow(2))).to(d.dtype());
     }},
    {"fft", [](Drawer& d) {
       return at::fft_ifft(at::fft_fft(d.Value().to(at::kDouble))).abs().to(d.dtype());
     }},
    {"dtypes", [](Drawer& d) {
       return (d.Value().to(at::kHalf) + 1).to(at::kBFloat16).mul(2).to(at::kDouble).sin().to(
           d.dtype());
     }},
    {"custom", [](Drawer& d) {
       return SumAndProduct::apply(d.Value(), d.Value())[d.Below(2)];
     }},
    {"custom_in_place", [](Drawer& d) {
       return NegateInPlace::apply(d.Value().clone())[d.Below(2)];
     }},
    {"custom_undefined", [](Drawer& d) { return First::apply(d.Value(), d.Value() * 2); }},
    {"checkpoint", [](Drawer& d) { return Checkpoint::apply(d.Value()); }},
    {"in_place", [](Drawer& d) { return d.Value().clone().mul_(d.Value()).add_(1).tanh_(); }},
    {"in_place_on_view", [](Drawer& d) {
       Tensor a = d.Value().clone();
       a.narrow(0, 0, 2).mul_(d.Value().narrow(0, 1, 2));
       a.t().select(0, 1).copy_(d.Value().select(0, 0));
       return a;
     }},
    {"empty_and_scalar", [](Drawer& d) {
       const Tensor a = d.Value();
       return a.slice(0, 2, 2).sum() + a.sum() * d.NewLeaf({}) + a * 0.5;
     }},
};
// clang-format on

// What hooks do: note what they see, and often change it.
struct Scale {
  std::shared_ptr<std::vector<std::string>> trace;
  std::string name;
  double factor;

  Tensor operator()(const Tensor& gradient) const {
    trace->push_back(absl::StrCat(name, ": ", Fingerprint(gradient)));
    return gradient.defined() ? gradient * factor : gradient;
  }
  variable_list All(const variable_list& gradients) const {
    variable_list scaled;
    for (const Tensor& gradient : gradients) scaled.push_back((*this)(gradient));
    return scaled;
  }
};

struct PreHook : torch::autograd::FunctionPreHook {
  explicit PreHook(Scale s) : scale(std::move(s)) {}
  variable_list operator()(const variable_list& gradients) override { return scale.All(gradients); }
  const Scale scale;
};

struct PostHook : torch::autograd::FunctionPostHook {
  explicit PostHook(Scale s) : scale(std::move(s)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    scale.All(inputs);
    return scale.All(outputs);
  }
  const Scale scale;
};

struct PostAccumulateHook : torch::autograd::PostAccumulateGradHook {
  explicit PostAccumulateHook(Scale s) : scale(std::move(s)) {}
  void operator()(const Variable& tensor) override { tensor.mutable_grad() = scale(tensor.grad()); }
  const Scale scale;
};

}  // namespace

Program::Program(uint64_t seed, const ProgramOptions& options) {
  at::manual_seed(seed);
  Drawer draw(seed, options.dtype);
  for (size_t i = 0; i < 3; ++i) {
    draw.AddValue(i < options.inputs.size() ? options.inputs[i] : draw.NewLeaf({kSize, kSize}));
  }
  std::vector<std::string> names;
  for (int i = 0; i < options.operators; ++i) {
    const Operator& op = kOperators[draw.Below(std::size(kOperators))];
    names.push_back(op.name);
    // Within [-1, 1], so that nothing overflows a half.
    Tensor value = op.make(draw).tanh();
    const std::string name = absl::StrCat(i, " ", op.name);
    const auto scale = [&](absl::string_view kind) {
      return Scale{trace, absl::StrCat(kind, " of ", name), 1.25};
    };
    if (options.hooks) {
      switch (draw.Below(8)) {
        case 0:
          value.register_hook(scale("tensor hook"));
          break;
        case 1:
          value.register_hook([s = scale("observer")](Tensor g) { s(g); });
          break;
        case 2:
          value.grad_fn()->add_pre_hook(std::make_unique<PreHook>(scale("pre-hook")));
          break;
        case 3:
          value.grad_fn()->add_post_hook(std::make_unique<PostHook>(scale("post-hook")));
          break;
        case 4:
          value.retain_grad();
          retained.push_back(value);
          value.register_hook(scale("hook beside retain_grad"));
          break;
        default:
          break;
      }
    }
    draw.AddValue(std::move(value));
  }
  leaves = std::move(draw.leaves());
  for (size_t i = 0; options.hooks && i < leaves.size(); ++i) {
    const Scale scale{trace, absl::StrCat("leaf ", i), 0.75};
    accumulators.push_back(torch::autograd::impl::grad_accumulator(leaves[i]));
    switch (draw.Below(6)) {
      case 0:
        leaves[i].register_hook(scale);
        break;
      case 1:
        accumulators[i]->add_pre_hook(std::make_unique<PreHook>(scale));
        break;
      case 2:
        accumulators[i]->add_post_hook(std::make_unique<PostHook>(scale));
        break;
      case 3:
        if (!options.post_accumulate_hooks) break;
        torch::autograd::impl::set_post_acc_grad_hooks(leaves[i],
                                                       std::make_unique<PostAccumulateHook>(scale));
        break;
      default:
        break;
    }
  }
  for (int i = 0; i < options.roots; ++i) {
    roots.push_back(i == 0 ? draw.values().back() : draw.Value());
    if (!roots.back().requires_grad()) roots.back() = draw.values().front();
    root_gradients.push_back(at::randn_like(roots.back()));
  }
  text = absl::StrJoin(names, " ");
}

std::vector<std::string> ProgramOperatorNames() {
  std::vector<std::string> names;
  for (const Operator& op : kOperators) names.push_back(op.name);
  return names;
}

std::string Fingerprint(const Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  if (tensor.is_sparse()) {
    return absl::StrCat("sparse ", tensor.sparse_dim(), " (", Fingerprint(tensor._indices()), ") (",
                        Fingerprint(tensor._values()), ")");
  }
  const Tensor flat = tensor.resolve_conj().resolve_neg().contiguous();
  uint64_t hash = 14695981039346656037u;
  const auto* bytes = static_cast<const unsigned char*>(flat.data_ptr());
  for (size_t i = 0; i < flat.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
  return absl::StrCat(c10::toString(tensor.scalar_type()), " [", absl::StrJoin(tensor.sizes(), ","),
                      "] strides [", absl::StrJoin(tensor.strides(), ","), "] ", absl::Hex(hash));
}

}  // namespace distgrad
