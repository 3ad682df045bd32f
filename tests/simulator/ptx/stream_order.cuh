#pragma once

/// One kernel runs at a time here.
inline void begin_in_stream_order() {}
