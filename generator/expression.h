//===- expression.h - The language of masks and of functions of the score --===//
//
// A mask says which keys a query sees: a bool of a batch b, a query head h, a query's position q
// and a key's position k, as in "q >= k & doc[b, q] == doc[b, k]". A score function changes the
// scaled score s: a float of s and of the same names, as in "30.0 * tanh(s / 30.0)".
//
// Operators, from the loosest: | ^ &, comparisons, + -, * / // %, unary - ~. Unlike in C and Python
// a comparison binds more tightly than & ^ |, which take bools alone. / gives a float; // and % are
// those of Python and divide ints by a constant. Functions: min max abs where, and, of floats, tanh
// exp log sqrt sigmoid pow float. An int becomes a float where the other side is one.
//
// Ints have 32 bits and wrap. Floats are FP32, and FP64 in evaluate(). Literals are rounded to FP32
// when they are read. Operations on constants are folded, except tanh, exp, log, sigmoid and pow,
// whose last bit depends on the machine, and those that give NaN.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/fields.h"

#include <array>
#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace sagebwd {

enum class ValueType : uint8_t { boolean, integer, real };
template <> struct Words<ValueType> {
  static constexpr std::string_view what = "type of a value";
  static constexpr Word<ValueType> all[] = {
      {ValueType::boolean, "bool"}, {ValueType::integer, "int"}, {ValueType::real, "float"}};
};

/// The names of values that an expression reads at each pair of a query and a key.
enum class PointName : uint8_t { b, h, q, k, s };
template <> struct Words<PointName> {
  static constexpr std::string_view what = "name in an expression";
  static constexpr Word<PointName> all[] = {{PointName::b, "b"},
                                            {PointName::h, "h"},
                                            {PointName::q, "q"},
                                            {PointName::k, "k"},
                                            {PointName::s, "s"}};
};

/// The tensor of a caller, which an expression reads by one or two indices. ValueType::boolean is
/// no type of an operand.
struct OperandType {
  ValueType type = ValueType::integer;
  int indices = 1;
  bool operator==(const OperandType&) const = default;
};
using OperandTypes = std::map<std::string, OperandType, std::less<>>;
struct ExpressionOperand {
  std::string name;
  OperandType type;
  bool operator==(const ExpressionOperand&) const = default;
};

/// Which names a value depends on.
struct Dependence {
  bool b = false, h = false, q = false, k = false, s = false;
  bool operator==(const Dependence&) const = default;
};

/// An immutable expression whose types have been checked. Two are equal if their texts are.
class Expression {
public:
  enum class Op : uint8_t {
    literal, ///< a constant
    name,    ///< one of PointName
    read,    ///< an operand at its indices
    one_of,
    differ,
    both,
    equal,
    not_equal,
    less,
    less_equal,
    greater,
    greater_equal,
    add,
    subtract,
    multiply,
    divide,
    floor_divide,
    modulo,
    negate,
    invert,
    least, ///< of two
    greatest,
    absolute,
    where, ///< the second input where the first is true, else the third
    tanh,
    exp,
    log,
    sqrt,
    sigmoid,
    pow,
    to_float,
  };
  static constexpr int kNone = -1;

  struct Node {
    Op op = Op::literal;
    ValueType type = ValueType::boolean;
    /// A literal's bits: of an int, or of a float in FP32; 0 or 1. A PointName. The number of an
    /// operand. Otherwise 0.
    int32_t value = 0;
    std::array<int, 3> inputs = {kNone, kNone, kNone}; ///< positions of nodes that come before it
    auto operator<=>(const Node&) const = default;
  };

  /// All nodes, each once though it may be an input of several. The last one is the result.
  const std::vector<Node>& nodes() const { return nodes_; }
  /// The operands in the order in which the text names them first.
  const std::vector<ExpressionOperand>& operands() const { return operands_; }
  ValueType type() const { return nodes_.back().type; }
  bool operator==(const Expression&) const = default;

private:
  Expression() = default;
  friend class ExpressionBuilder;
  std::vector<Node> nodes_;
  std::vector<ExpressionOperand> operands_;
};

/// Limits of a text and of its canonical form: characters, brackets inside of each other, and
/// names, literals, operators and calls. An operand's name has letters a to z, digits and '_'.
inline constexpr size_t kMostCharacters = 2000, kMostBrackets = 100, kMostNodes = 500;
inline constexpr size_t kMostOperands = 8, kLongestOperandName = 16;

/// Parses a bool that does not use s. Operands have the types of the table. Without one they are
/// ints, and have as many indices as where they are used first. Raises SpecError, which names the
/// column.
Expression parse_mask(std::string_view, const OperandTypes* = nullptr);
/// Parses a float that uses s. Without a table operands are floats. Indices cannot use s.
Expression parse_score(std::string_view, const OperandTypes* = nullptr);

/// The canonical text: of all texts with the same tree the one with least brackets, with single
/// spaces around operators of two sides. With the same types of operands it is parsed as the same
/// expression. It must not change, as cache keys have it. That of a derivative may pass the limits.
std::string to_string(const Expression&);

/// C++ variables of these names hold what the expression reads: ints, and s a float.
struct PointVariables {
  std::string b = "b", h = "h", q = "q", k = "k", s = "s";
};
/// Statements, a line each, which define the constants t0, t1, ..., and behind them an expression
/// of type bool, int or float, which stands alone behind = or return.
struct CudaText {
  std::string statements, result;
};
/// Prints C++ with exact literals, in which what is used twice is computed once. It has no
/// undefined behaviour if these functions have none, which whoever includes it defines:
///   int wrap_add(int, int), wrap_sub(int, int), wrap_mul(int, int), wrap_neg(int), wrap_abs(int)
///     the result modulo 2^32;
///   int floor_div(int a, int c), floor_mod(int a, int c)
///     as in Python, for a constant c other than 0; INT_MIN by -1 gives INT_MIN and 0;
///   T min_of(T a, T b), max_of(T a, T b) for int and float
///     b < a ? b : a and a < b ? b : a;
///   float abs_of(float), tanh_of(float), exp_of(float), log_of(float), sqrt_of(float),
///   sigmoid_of(float), pow_of(float, float), quotient(float, float), infinity(), to_float(int);
///   read_NAME(int) or read_NAME(int, int) for each operand
///     the element, an int or a float, with each index clamped into its range.
/// Everything else is + - * of floats, comparisons, ! & | ^ of bools, and ?: of either type.
CudaText to_cuda(const Expression&, const PointVariables& = {});
/// Prints the same over ranges of a mask's ints, for tile/math/ranges.cuh: bools have the type
/// Truth, ints the type Ints, and choose() and choose_truth() stand for the operator ?:, which none
/// can define.
CudaText to_cuda_of_ranges(const Expression&);
/// Prints a node alone, and an expression with texts in the place of nodes.
CudaText to_cuda_of_node(const Expression&, size_t node);
CudaText to_cuda_beside(const Expression&, const std::map<size_t, std::string>& given);
/// The nodes that read operands at places that depend on q and not on k, which are the same for all
/// keys of a query; without those that another one holds.
std::vector<size_t> reads_of_query(const Expression&);

/// The derivative of a float with respect to s, simplified. That of min, max, abs and where is the
/// derivative of what they choose: min and max the first of two that are equal. Conditions count as
/// constants. Terms with a factor that is always 0 vanish, even where the other factor is infinite.
/// Where a part has an infinite derivative, as sqrt at 0, the value may be NaN.
Expression derivative(const Expression&);
/// `factor` times the float, for an s in units of `unit`: factor f(unit s), except for rounding.
/// Factors go where they meet constants, and vanish where they meet their inverse. The s of the
/// result comes times `given`. Ints that are sums of positions become floats part by part, which is
/// exact up to 2^24.
Expression rescaled(const Expression&, double unit, double factor, double given = 1);
/// By what that multiplies s where it takes it: with a `given` that is the only one, by nothing.
std::set<double> factors_of_s(const Expression&, double unit, double factor);
/// Whether f is s + g, where g does not depend on s. Recognised are sums, and such terms in min,
/// max and where. Others may be too, unrecognised.
bool is_shift(const Expression&);

/// The values of names at one pair of a query and a key; s is in FP64.
struct Point {
  int32_t b = 0, h = 0, q = 0, k = 0;
  double s = 0;
};
/// Gives the element of an operand, by its position in operands(). Without a second index j is 0.
/// Indices may be out of range: whoever reads clamps them.
using ReadOperand = std::function<double(size_t operand, int32_t i, int32_t j)>;
/// Evaluates in int32 and FP64; floats are in FP32 if asked for, as masks have them in kernels. A
/// bool gives 0 or 1.
double evaluate(const Expression&, const Point&, const ReadOperand& = nullptr,
                bool in_fp32 = false);

/// Which names the expression depends on, also through indices of operands.
Dependence dependence(const Expression&);

} // namespace sagebwd
