#pragma once

namespace simulator {
template <class T> constexpr Element kElement = Element::bf16;
template <> constexpr Element kElement<fp16> = Element::fp16;
} // namespace simulator
