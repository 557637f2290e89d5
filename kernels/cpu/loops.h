// The elementwise passes and reductions of the CPU backend. Operands are checked by the caller (operand_checks.h).
//
// Every result is the same whatever the team's size: reductions add fixed parts in a fixed order.
#pragma once

#include "kernels/activation.h"
#include "kernels/cpu/team.h"
#include "kernels/matrix.h"
#include "kernels/optimizer.h"

namespace shardmlp {

void CopyMatrix(const Team& team, ConstMatrixView from, MatrixView to);
void ZeroMatrix(const Team& team, MatrixView m);

// As Backend's virtuals of these names.
void ActivationForward(const Team& team, const Activation& activation, ConstMatrixView gate_up, MatrixView a);
void ActivationBackward(const Team& team, const Activation& activation, MatrixView gate_up, MatrixView da);
void AddColumnSums(const Team& team, ConstMatrixView m, MatrixView sum);
double SumOfSquares(const Team& team, ConstMatrixView m);
void UpdateTensor(const Team& team, const OptimizerUpdate& update);

}  // namespace shardmlp
