// See third_party/gloo/gloo/context.h.
#pragma once
