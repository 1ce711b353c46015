#include "xla_ffi/common/ffa_operands.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace magi_jax {
namespace {

// Offsets of rows and tiles are held in int32.
constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max() / 2;

std::string Join(const int64_t* begin, const int64_t* end) {
  std::string text = "[";
  for (const int64_t* extent = begin; extent != end; ++extent) {
    if (extent != begin) text += ", ";
    text += std::to_string(*extent);
  }
  return text + "]";
}

ffi::Error CheckRank(const char* name, ffi::AnyBuffer buffer, size_t rank) {
  if (buffer.dimensions().size() == rank) return ffi::Error::Success();
  return InvalidArgument(std::string(name) + " must have " + std::to_string(rank) +
                         " dimensions, got shape " + DescribeShape(buffer));
}

ffi::Error CheckS32(const std::string& name, ffi::AnyBuffer buffer) {
  if (buffer.element_type() == ffi::DataType::S32) return ffi::Error::Success();
  return InvalidArgument(name + " must be int32, got XLA type " +
                         std::to_string(static_cast<int>(buffer.element_type())));
}

ffi::Error CheckTable(const std::string& name, ffi::AnyBuffer buffer, bool six_columns) {
  MAGI_JAX_RETURN_IF_ERROR(CheckS32(name, buffer));
  auto dims = buffer.dimensions();
  bool fits = six_columns ? dims.size() == 2 && dims[1] == 6 : dims.size() == 1;
  if (fits && dims[0] <= kMaxExtent) return ffi::Error::Success();
  return InvalidArgument(name + " must have shape " + (six_columns ? "[entries, 6]" : "[entries]") +
                         ", got " + DescribeShape(buffer));
}

// Fills `problem` from the shapes and dtypes of q, k, v and the attributes.
ffi::Error DecodeProblem(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                         const Attributes& attributes, Problem* problem) {
  MAGI_JAX_RETURN_IF_ERROR(CheckRank("q", q, 3));
  MAGI_JAX_RETURN_IF_ERROR(CheckRank("k", k, 3));
  MAGI_JAX_RETURN_IF_ERROR(CheckRank("v", v, 3));
  auto q_dims = q.dimensions(), k_dims = k.dimensions(), v_dims = v.dimensions();
  int64_t q_len = q_dims[0], num_heads = q_dims[1], head_dim = q_dims[2];
  int64_t k_len = k_dims[0], num_kv_heads = k_dims[1], v_head_dim = v_dims[2];
  MAGI_JAX_RETURN_IF_ERROR(CheckShape("k", k, {k_len, num_kv_heads, head_dim}));
  MAGI_JAX_RETURN_IF_ERROR(CheckShape("v", v, {k_len, num_kv_heads, v_head_dim}));
  for (int64_t extent : {q_len, k_len, num_heads, num_kv_heads, head_dim, v_head_dim}) {
    if (extent > kMaxExtent) {
      return InvalidArgument("an extent of " + std::to_string(extent) +
                             " does not fit in 30 bits: q " + DescribeShape(q) + ", k " +
                             DescribeShape(k) + ", v " + DescribeShape(v));
    }
  }
  if (num_heads < 1 || num_kv_heads < 1 || num_heads % num_kv_heads != 0) {
    return InvalidArgument("q has " + std::to_string(num_heads) +
                           " heads, which is not a positive multiple of the " +
                           std::to_string(num_kv_heads) + " of k; got q " + DescribeShape(q) +
                           ", k " + DescribeShape(k));
  }
  if (head_dim < 1 || v_head_dim < 1) {
    return InvalidArgument("head dims must be positive; got q " + DescribeShape(q) + ", v " +
                           DescribeShape(v));
  }
  if (!std::isfinite(attributes.scale) || !(attributes.logits_soft_cap >= 0.0f) ||
      !std::isfinite(attributes.logits_soft_cap) || attributes.tile_size < 1) {
    return InvalidArgument("attributes out of range: scale " + std::to_string(attributes.scale) +
                           ", logits_soft_cap " + std::to_string(attributes.logits_soft_cap) +
                           ", tile_size " + std::to_string(attributes.tile_size));
  }
  DType k_dtype, v_dtype;
  MAGI_JAX_RETURN_IF_ERROR(DecodeDType("q", q, &problem->dtype));
  MAGI_JAX_RETURN_IF_ERROR(DecodeDType("k", k, &k_dtype));
  MAGI_JAX_RETURN_IF_ERROR(DecodeDType("v", v, &v_dtype));
  if (k_dtype != problem->dtype || v_dtype != problem->dtype) {
    return InvalidArgument("q, k and v must have one dtype");
  }
  problem->q_len = static_cast<int32_t>(q_len);
  problem->k_len = static_cast<int32_t>(k_len);
  problem->num_heads = static_cast<int32_t>(num_heads);
  problem->num_kv_heads = static_cast<int32_t>(num_kv_heads);
  problem->head_dim = static_cast<int32_t>(head_dim);
  problem->v_head_dim = static_cast<int32_t>(v_head_dim);
  problem->tile_size = attributes.tile_size;
  problem->scale = attributes.scale;
  problem->logits_soft_cap = attributes.logits_soft_cap;
  return ffi::Error::Success();
}

}  // namespace

std::string DescribeShape(ffi::AnyBuffer buffer) {
  auto dims = buffer.dimensions();
  return Join(dims.begin(), dims.end());
}

ffi::Error CheckShape(const char* name, ffi::AnyBuffer buffer,
                      std::initializer_list<int64_t> expected) {
  auto dims = buffer.dimensions();
  if (std::equal(dims.begin(), dims.end(), expected.begin(), expected.end())) {
    return ffi::Error::Success();
  }
  return InvalidArgument(std::string(name) + " must have shape " +
                         Join(expected.begin(), expected.end()) + ", got " + DescribeShape(buffer));
}

ffi::Error CheckF32(const char* name, ffi::AnyBuffer buffer) {
  if (buffer.element_type() == ffi::DataType::F32) return ffi::Error::Success();
  return InvalidArgument(std::string(name) + " must be float32, got XLA type " +
                         std::to_string(static_cast<int>(buffer.element_type())));
}

ffi::Error DecodeDType(const char* name, ffi::AnyBuffer buffer, DType* dtype) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      *dtype = DType::kF32;
      return ffi::Error::Success();
    case ffi::DataType::F16:
      *dtype = DType::kF16;
      return ffi::Error::Success();
    case ffi::DataType::BF16:
      *dtype = DType::kBF16;
      return ffi::Error::Success();
    default:
      return InvalidArgument(std::string(name) +
                             " must be float32, float16 or bfloat16, got XLA type " +
                             std::to_string(static_cast<int>(buffer.element_type())));
  }
}

ffi::Error DecodeForward(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                         const Attributes& attributes, const ForwardResults& results,
                         ForwardParams* params) {
  const auto& [out, lse, row_max] = results;
  Problem& problem = params->problem;
  MAGI_JAX_RETURN_IF_ERROR(DecodeProblem(q, k, v, attributes, &problem));
  MAGI_JAX_RETURN_IF_ERROR(
      CheckShape("out", out, {problem.q_len, problem.num_heads, problem.v_head_dim}));
  MAGI_JAX_RETURN_IF_ERROR(CheckShape("lse", lse, {problem.q_len, problem.num_heads}));
  MAGI_JAX_RETURN_IF_ERROR(CheckF32("lse", lse));
  MAGI_JAX_RETURN_IF_ERROR(DecodeDType("out", out, &params->out_dtype));
  if (params->out_dtype != problem.dtype && params->out_dtype != DType::kF32) {
    return InvalidArgument("out must be float32 or have the dtype of q");
  }
  params->q = q.untyped_data();
  params->k = k.untyped_data();
  params->v = v.untyped_data();
  params->out = out.untyped_data();
  params->lse = static_cast<float*>(lse.untyped_data());
  MAGI_JAX_RETURN_IF_ERROR(CheckF32("row_max", row_max));
  if (row_max.element_count() > 0) {
    MAGI_JAX_RETURN_IF_ERROR(CheckShape("row_max", row_max, {problem.q_len, problem.num_heads}));
    params->row_max = static_cast<float*>(row_max.untyped_data());
  }
  return ffi::Error::Success();
}

ffi::Error DecodeEarlier(ffi::AnyBuffer out_in, ffi::AnyBuffer lse_in, ForwardParams* params) {
  const Problem& problem = params->problem;
  DType dtype;
  MAGI_JAX_RETURN_IF_ERROR(DecodeDType("out_in", out_in, &dtype));
  if (dtype != params->out_dtype) return InvalidArgument("out_in must have the dtype of out");
  MAGI_JAX_RETURN_IF_ERROR(CheckF32("lse_in", lse_in));
  MAGI_JAX_RETURN_IF_ERROR(
      CheckShape("out_in", out_in, {problem.q_len, problem.num_heads, problem.v_head_dim}));
  MAGI_JAX_RETURN_IF_ERROR(CheckShape("lse_in", lse_in, {problem.q_len, problem.num_heads}));
  params->accumulates = true;
  return ffi::Error::Success();
}

ffi::Error DecodeBackward(ffi::AnyBuffer dout, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                          ffi::AnyBuffer lse, ffi::AnyBuffer delta, const Attributes& attributes,
                          BackwardParams* params) {
  Problem& problem = params->problem;
  MAGI_JAX_RETURN_IF_ERROR(DecodeProblem(q, k, v, attributes, &problem));
  MAGI_JAX_RETURN_IF_ERROR(
      CheckShape("dout", dout, {problem.q_len, problem.num_heads, problem.v_head_dim}));
  MAGI_JAX_RETURN_IF_ERROR(CheckShape("lse", lse, {problem.q_len, problem.num_heads}));
  MAGI_JAX_RETURN_IF_ERROR(CheckShape("delta", delta, {problem.q_len, problem.num_heads}));
  MAGI_JAX_RETURN_IF_ERROR(CheckF32("lse", lse));
  MAGI_JAX_RETURN_IF_ERROR(CheckF32("delta", delta));
  DType dout_dtype;
  MAGI_JAX_RETURN_IF_ERROR(DecodeDType("dout", dout, &dout_dtype));
  if (dout_dtype != problem.dtype) return InvalidArgument("dout must have the dtype of q");
  params->dout = dout.untyped_data();
  params->q = q.untyped_data();
  params->k = k.untyped_data();
  params->v = v.untyped_data();
  params->lse = static_cast<const float*>(lse.untyped_data());
  params->delta = static_cast<const float*>(delta.untyped_data());
  return ffi::Error::Success();
}

ffi::Error DecodeGradients(bool rounds_dq, ffi::AnyBuffer k, ffi::AnyBuffer dq, ffi::AnyBuffer dk,
                           ffi::AnyBuffer dv, BackwardParams* params) {
  const Problem& problem = params->problem;
  MAGI_JAX_RETURN_IF_ERROR(
      CheckShape("dq", dq, {problem.q_len, problem.num_heads, problem.head_dim}));
  MAGI_JAX_RETURN_IF_ERROR(
      CheckShape("dk", dk, {problem.k_len, problem.num_kv_heads, problem.head_dim}));
  MAGI_JAX_RETURN_IF_ERROR(
      CheckShape("dv", dv, {problem.k_len, problem.num_kv_heads, problem.v_head_dim}));
  const bool rounded =
      rounds_dq && dq.element_type() == k.element_type() && dq.element_type() != ffi::DataType::F32;
  if (!rounded) MAGI_JAX_RETURN_IF_ERROR(CheckF32("dq", dq));
  const ffi::DataType type = dk.element_type();
  if (dv.element_type() != type || (type != ffi::DataType::F32 && type != k.element_type())) {
    return InvalidArgument("dk and dv must both be float32 or both have the dtype of k");
  }
  MAGI_JAX_RETURN_IF_ERROR(DecodeDType("dk", dk, &params->dkv_dtype));
  params->dq = rounded ? nullptr : static_cast<float*>(dq.untyped_data());
  params->dq_rounded = rounded ? dq.untyped_data() : nullptr;
  params->dk = dk.untyped_data();
  params->dv = dv.untyped_data();
  return ffi::Error::Success();
}

ffi::Error DecodeEarlier(ffi::AnyBuffer dq_in, BackwardParams* params) {
  const Problem& problem = params->problem;
  if (params->dq_rounded == nullptr) {
    MAGI_JAX_RETURN_IF_ERROR(CheckF32("dq_in", dq_in));
  } else {
    DType dtype;
    MAGI_JAX_RETURN_IF_ERROR(DecodeDType("dq_in", dq_in, &dtype));
    if (dtype != problem.dtype) return InvalidArgument("dq_in must have the dtype of dq");
  }
  MAGI_JAX_RETURN_IF_ERROR(
      CheckShape("dq_in", dq_in, {problem.q_len, problem.num_heads, problem.head_dim}));
  params->accumulate = true;
  return ffi::Error::Success();
}

ffi::Error DecodeSlices(ffi::AnyBuffer buffer, Problem* problem, const Slice** slices) {
  MAGI_JAX_RETURN_IF_ERROR(CheckTable("slices", buffer, /*six_columns=*/true));
  *slices = static_cast<const Slice*>(buffer.untyped_data());
  problem->num_slices = static_cast<int32_t>(buffer.dimensions()[0]);
  return ffi::Error::Success();
}

ffi::Error DecodeTileRuns(const TileRunsOperands& operands, int32_t length, int32_t tile_size,
                          TileRuns* runs) {
  std::string name = operands.name;
  MAGI_JAX_RETURN_IF_ERROR(CheckTable(name + ".ptr", operands.ptr, /*six_columns=*/false));
  MAGI_JAX_RETURN_IF_ERROR(CheckTable(name + ".runs", operands.runs, /*six_columns=*/true));
  MAGI_JAX_RETURN_IF_ERROR(CheckTable(name + ".ids", operands.ids, /*six_columns=*/false));
  MAGI_JAX_RETURN_IF_ERROR(CheckTable(name + ".order", operands.order, /*six_columns=*/false));
  // The table has one (empty) tile even where there is no row.
  int64_t num_tiles = std::max<int64_t>((int64_t{length} + tile_size - 1) / tile_size, 1);
  int64_t ptr_len = operands.ptr.dimensions()[0], order_len = operands.order.dimensions()[0];
  if (ptr_len != num_tiles + 1 || order_len != num_tiles) {
    return InvalidArgument(name + " is for " + std::to_string(order_len) + " tiles (ptr has " +
                           std::to_string(ptr_len) + " entries), but " + std::to_string(length) +
                           " rows make " + std::to_string(num_tiles) + " tiles of " +
                           std::to_string(tile_size));
  }
  runs->ptr = static_cast<const int32_t*>(operands.ptr.untyped_data());
  runs->runs = static_cast<const Run*>(operands.runs.untyped_data());
  runs->ids = static_cast<const int32_t*>(operands.ids.untyped_data());
  runs->order = static_cast<const int32_t*>(operands.order.untyped_data());
  runs->num_tiles = static_cast<int32_t>(num_tiles);
  runs->num_runs = static_cast<int32_t>(operands.runs.dimensions()[0]);
  runs->num_ids = static_cast<int32_t>(operands.ids.dimensions()[0]);
  return ffi::Error::Success();
}

}  // namespace magi_jax
